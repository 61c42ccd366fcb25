"""The order of a chain graph's works: by list scheduling with priorities from costs, and by a search over these.

The same graph gives the same order on every rank and machine: a search plays a number of orders that the graph fixes,
whatever time that takes, and draws from a generator whose numbers never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flowtrain_lightning.packing.searched.chain_graph import ChainGraph
from flowtrain_lightning.packing.searched.list_schedule import list_schedule, seconds_in_order
from flowtrain_lightning.packing.step_graph import BlockedError
from flowtrain_lightning.packing.step_plan import BoolArray, FloatArray, IntArray

_WORKS_PLAYED = 1_000_000
"""Works of all plays of a search: about a tenth of a second where loops are compiled."""

_FEWEST_PLAYS = 100

_PLAYS_OF_EACH = 10
"""Plays for each work, as far as that is no more."""

_BACKWARD_FIRST = 1e6
"""Sets every backward before every forward."""

_ACCEPTED = 0.004
"""By so much longer than the one before an order may be at the start of a search; this falls to nothing."""

_WORTH = 0.01
"""By so much an order must be shorter than those of other policies to be taken: costs are never quite right."""

_RULES = ((0.0, 0.5, _BACKWARD_FIRST, _BACKWARD_FIRST), (0.0, 2.0, 3.0, 3.0), (0.0, 4.0, 1.0, 2.0))
"""Of forwards of roles that are read and of those that read, then of backwards: how many units each goes ahead."""


class Limits(NamedTuple):
    """Memory that orders keep to.

    Attributes:
        kept: ``[stores]`` what may be kept in each at a time.
        spare: ``[stores]`` of it, what is left free where something is computed again.
        again: ``[stores]`` whether what finds no room may be computed again.
    """

    kept: FloatArray
    spare: FloatArray
    again: BoolArray

    @classmethod
    def of(cls, graph: ChainGraph, kept: FloatArray) -> Limits:
        """Limits in bytes, within which what is computed again has its place too."""
        return cls(kept, graph.most_room, np.ones(len(kept), dtype=np.bool_))


@dataclass(frozen=True)
class ListedOrder:
    """An order of all works, and what it takes.

    Attributes:
        order: the works as they begin; none comes before what it needs, so ranks that keep to it never block.
        recomputed: ``[works]`` the forwards that keep nothing.
        seconds: of the step.
    """

    order: IntArray
    recomputed: BoolArray
    seconds: float

    def takes(self, graph: ChainGraph) -> float:
        """Seconds of the same order with the costs of another graph of the same works."""
        parts = (graph.ranks, graph.seconds, graph.forward_of, *graph.takers)
        return float(seconds_in_order(self.order, *parts, self.recomputed))


def by_priority(graph: ChainGraph, limits: Limits, priority: FloatArray) -> ListedOrder:
    """The order in which every free rank begins the work of the least priority value that it can.

    Raises:
        BlockedError: no rank can go on, and nothing may be computed again.
    """
    parts = (graph.ranks, graph.seconds, graph.stores, graph.room, graph.forward_of, *graph.takers, graph.lacks)
    order, recomputed = list_schedule(*parts, priority, *limits)
    if len(order) < len(graph):
        raise BlockedError
    # Less than it took to find: what is computed again no longer waits for it to be seen that there is no room.
    seconds = seconds_in_order(order, graph.ranks, graph.seconds, graph.forward_of, *graph.takers, recomputed)
    return ListedOrder(order, recomputed, float(seconds))


def greedy_order(graph: ChainGraph, limits: Limits) -> ListedOrder:
    """The order of arrival: backwards first, then units in order, deeper stages first.

    Raises:
        BlockedError: see `by_priority`.
    """
    return by_priority(graph, limits, _Priorities(graph).of(next(_starts(graph))))


def searched_order(
    graph: ChainGraph, limits: Limits, others: Sequence[ListedOrder] = (), plays: int | None = None
) -> ListedOrder:
    """The shortest order that a local search over priorities finds.

    It tries a few rules, such as units with little to compute first, and goes on from the best one: it swaps units,
    moves one, or lets one role's passes go further ahead, and keeps what is shorter, or hardly longer.

    Args:
        graph: of the step.
        limits: of memory.
        others: orders by other policies, which are taken unless the one found is clearly shorter.
        plays: how many orders to play; None follows from the graph's size.

    Raises:
        BlockedError: see `by_priority`.
    """
    plays = plays or max(_FEWEST_PLAYS, min(_WORKS_PLAYED // len(graph), _PLAYS_OF_EACH * len(graph)))
    priorities, random = _Priorities(graph), np.random.RandomState(0)
    given = min(others, key=lambda found: found.seconds, default=None)
    current, place = None, np.empty(0)
    for start in _starts(graph):
        found, plays = by_priority(graph, limits, priorities.of(start)), plays - 1
        if current is None or found.seconds < current.seconds:
            current, place = found, start
    assert current is not None, "there is a rule"
    best = current
    accepted, falls = best.seconds * _ACCEPTED, best.seconds * _ACCEPTED / max(plays, 1)
    for _ in range(plays):
        moved = priorities.moved(place, random.random_sample(4))
        found = by_priority(graph, limits, priorities.of(moved))
        if found.seconds < current.seconds + accepted:
            current, place = found, moved
        best = found if found.seconds < best.seconds else best
        accepted -= falls
    return given if given is not None and best.seconds > given.seconds * (1 - _WORTH) else best


class _Priorities:
    """Priorities of works from few numbers: a place for each unit, then a shift for each role and direction."""

    def __init__(self, graph: ChainGraph) -> None:
        self._units = int(graph.units.max()) + 1
        self._of_unit = graph.units
        self._of_kind = self._units + graph.roles * 2 + graph.is_backward
        self._kinds = 2 * (int(graph.roles.max()) + 1)
        # Between two of one unit the deeper one goes first, then the chain that is listed first.
        self._fixed = graph.chains * (1e-3 / (int(graph.chains.max()) + 1)) - graph.depths * 1e-2

    def of(self, numbers: FloatArray) -> FloatArray:
        """``[works]`` their priorities."""
        found: FloatArray = numbers[self._of_unit] + numbers[self._of_kind] + self._fixed
        return found

    def moved(self, numbers: FloatArray, drawn: FloatArray) -> FloatArray:
        """The numbers after one move that ``[4]`` uniform numbers decide."""
        found: FloatArray = numbers.copy()
        kind, first, second, far = drawn.tolist()
        one, other = int(first * self._units), int(second * self._units)
        if kind < 0.5:
            found[one], found[other] = numbers[other], numbers[one]
        elif kind < 0.8:
            found[one] += (far + second - 1) * 4
        elif kind < 0.98:
            found[self._units + int(first * self._kinds)] += (far + second - 1) * 4
        else:
            found[self._units + 1 :: 2] = -_BACKWARD_FIRST
        return found


def _starts(graph: ChainGraph) -> Iterator[FloatArray]:
    """Numbers of rules, that of the order of arrival first."""
    roles = int(graph.roles.max()) + 1
    load = np.bincount(graph.units, graph.seconds)
    # What units differ in is what is read: those of the last role are alike at most.
    read = np.bincount(graph.units, graph.seconds * (graph.roles < roles - 1), len(load))
    places = [np.arange(len(load), dtype=np.float64)]
    for weights in (read if read.any() else load, load):
        rising = np.argsort(weights, kind="stable")
        ends = np.concatenate([rising[::2], rising[1::2][::-1]])
        alternating = np.empty_like(rising)
        alternating[::2], alternating[1::2] = rising[: -(-len(rising) // 2)], rising[::-1][: len(rising) // 2]
        for order in (rising, rising[::-1], ends, alternating):
            place = np.empty(len(load))
            place[order] = np.arange(len(load), dtype=np.float64)
            places.append(place)
    for place in places:
        for forward, last_forward, backward, last_backward in _RULES:
            shifts = np.empty((roles, 2))
            shifts[:-1] = -forward, -backward
            shifts[-1] = -last_forward, -last_backward
            yield np.concatenate([place, shifts.ravel()])
