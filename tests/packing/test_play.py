"""Playing random graphs: what begins has what it needs, and one linear order of all works never blocks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from flowtrain_lightning.packing.graph_of_step import graph_of_step
from flowtrain_lightning.packing.play import play
from flowtrain_lightning.packing.role_graph import Edge
from flowtrain_lightning.packing.step_graph import BatchOf, BlockedError, StepGraph, Work
from flowtrain_lightning.packing.step_work import StepRules, StepWork, TimedBatch
from tests.packing.sizes import meeting_of


def random_step(random: np.random.Generator) -> tuple[StepWork, StepRules]:
    """Up to four roles of up to three members: each role is read by one of those before it, or by nobody."""
    roles = [chr(ord("a") + number) for number in range(random.integers(2, 5))]
    edges = [Edge(role, roles[random.integers(number)]) for number, role in enumerate(roles[1:], 1)]
    ranks: dict[str, list[tuple[int, ...]]] = {}
    free, shared = 0, False  # fixed orders of ranks of several roles are for two roles only
    for role in roles:
        members, size = int(random.integers(1, 4)), int(random.integers(1, 3))
        first = 0 if ranks and random.random() < 0.4 else free
        ranks[role] = [tuple(range(first + m * size, first + (m + 1) * size)) for m in range(members)]
        shared |= first < free
        free = max(free, first + members * size)
    positions = {role: int(random.integers(1, 6)) for role in roles}
    readers_of = {edge.producer: edge.consumer for edge in edges}
    work = {
        role: [
            [
                TimedBatch(random.random(), random.random() + 0.01, _readers(random, readers_of.get(role), ranks, n))
                for n in range(positions[role])
            ]
            for _ in ranks[role]
        ]
        for role in roles
    }
    _within(work, positions)
    in_flight = {edge.producer: int(random.integers(1, 6)) for edge in edges}
    meets = {} if shared else {role: meeting_of(len(ranks[role])) for role in roles if random.random() < 0.4}
    return work, StepRules(ranks, edges, in_flight, meets)


def _readers(
    random: np.random.Generator, role: str | None, ranks: dict[str, list[tuple[int, ...]]], number: int
) -> tuple[BatchOf, ...]:
    """One batch of some members of the role that reads, at a position that never falls."""
    if role is None:
        return ()
    members = [member for member in range(len(ranks[role])) if random.random() < 0.7]
    return tuple(BatchOf(role, member, number) for member in members)


def _within(work: StepWork, positions: dict[str, int]) -> None:
    """Lets what is read at positions that are not there be read at the last one."""
    for members in work.values():
        for batches in members:
            batches[:] = [
                TimedBatch(
                    batch.forward,
                    batch.backward,
                    tuple(r._replace(number=min(r.number, positions[r.role] - 1)) for r in batch.readers),
                )
                for batch in batches
            ]


def in_one_order(graph: StepGraph, order: list[int]) -> StepGraph:
    """The same graph on ranks whose order is fixed: each does its works as they stand in one order of all."""
    lanes: dict[int, list[list[int]]] = {rank: [[]] for rank in graph.lanes}
    for work in order:
        for rank in graph.ranks[work]:
            lanes[rank][0].append(work)
    return StepGraph(graph.works, graph.needs, lanes, graph.meetings)


TIMINGS = 6


def played_steps(seeds):
    """Graphs that some order gets through, what they take, and how they were played."""
    for seed in seeds:
        work, rules = random_step(np.random.default_rng(seed))
        graph, seconds = graph_of_step(work, rules)
        try:
            yield graph, seconds, play(graph, seconds, dict.fromkeys(graph.lanes, 0.0))
        except BlockedError:
            continue


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 2000), marks=pytest.mark.full)], ids=len)
def test_an_order_of_all_works_never_blocks_whatever_takes_how_long(seeds):
    found = 0
    for number, (graph, _, played) in enumerate(played_steps(seeds)):
        found += 1
        fixed, random = in_one_order(graph, played.order), np.random.default_rng(number)
        assert sorted(played.order) == list(range(len(graph.works)))
        for _ in range(TIMINGS):
            again = play(fixed, random.exponential(size=len(graph.works)).tolist(), dict.fromkeys(graph.lanes, 0.0))
            for work, needs in enumerate(graph.needs):
                assert all(again.ends[needed] <= again.begins[work] for needed in needs)
    assert found > len(seeds) / 2


def test_the_same_graph_is_played_alike():
    for graph, seconds, played in played_steps(range(40)):
        assert play(graph, seconds, dict.fromkeys(graph.lanes, 0.0)) == played


def test_a_rank_does_one_work_at_a_time_and_those_of_a_meeting_begin_together():
    for graph, _, played in played_steps(range(40)):
        for rank in graph.lanes:
            own = sorted((played.begins[w], played.ends[w]) for w in played.order if rank in graph.ranks[w])
            assert all(end <= begin for (_, end), (begin, _) in pairwise(own))
        for meeting in graph.meetings:
            assert len({played.begins[work] for work in meeting}) == 1


def test_ranks_that_wait_for_what_each_other_does_later_are_told():
    works = [Work(BatchOf(role, 0, 0), "forward") for role in ("a", "b", "a", "b")]
    graph = StepGraph(works, needs=[[1], [], [], [2]], lanes={0: [[0, 2]], 1: [[3, 1]]})
    with pytest.raises(BlockedError, match="each waits for what another one does later"):
        play(graph, [1.0] * 4, {0: 0.0, 1: 0.0})
