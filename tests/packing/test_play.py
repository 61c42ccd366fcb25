"""Playing random graphs: what begins has what it needs, and one linear order of all works never blocks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from flowtrain_lightning.packing.graph_of_step import graph_of_step
from flowtrain_lightning.packing.play import play
from flowtrain_lightning.packing.step_graph import BatchOf, BlockedError, StepGraph, Work
from tests.packing.random_graphs import in_one_order, random_step

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
