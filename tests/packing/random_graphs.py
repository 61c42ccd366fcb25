"""Random steps over random graphs of roles, some of them on the same ranks."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.role_graph import Edge
from flowtrain_lightning.packing.step_graph import BatchOf, StepGraph
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
