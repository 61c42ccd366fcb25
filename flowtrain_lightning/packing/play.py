"""Plays a step graph: when every work begins and ends, if each takes a given time."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowtrain_lightning.packing.step_graph import BlockedError, StepGraph


@dataclass(frozen=True)
class Played:
    """A step that was played.

    Attributes:
        begins: ``[works]`` when each begins.
        ends: ``[works]`` when each ends.
        order: all works, as they begin: a linear order in which none comes before what it needs.
        free: rank -> when it has done the last of its works.
    """

    begins: list[float]
    ends: list[float]
    order: list[int]
    free: dict[int, float]


def play(graph: StepGraph, seconds: Sequence[float], start: Mapping[int, float]) -> Played:
    """Plays the works of a step.

    Every rank that is free takes the next work of its first lane that has what it needs, waits there for those that
    begin it together with this one, and is busy until its own work ends. What ends at the same time is seen together.
    A work of no rank, such as rows on their way, begins as soon as what it needs is there.

    Args:
        graph: of the step.
        seconds: ``[works]`` what each takes.
        start: rank -> when it begins the step.

    Raises:
        BlockedError: no rank can go on.
    """
    return _Playing(graph, seconds, start).run()


class _Playing:
    def __init__(self, graph: StepGraph, seconds: Sequence[float], start: Mapping[int, float]) -> None:
        self._seconds = seconds
        self._ranks, self._takers = graph.ranks, graph.takers
        self._begins = [0.0] * len(graph.works)
        self._ends = [0.0] * len(graph.works)
        self._order: list[int] = []
        self._free = dict(start)
        self._beginning_of, self._together = graph.beginnings
        self._lacks = [sum(len(graph.needs[work]) for work in together) for together in self._together]
        self._absent = [sum(len(self._ranks[work]) for work in together) for together in self._together]
        self._lanes = {rank: [list(reversed(lane)) for lane in lanes] for rank, lanes in graph.lanes.items()}
        self._idle, self._woken = set[int](), set[int]()
        # A heap of what runs: its end, and the work; of what a rank did before the step, -1 - rank.
        self._running = [(time, -1 - rank) for rank, time in start.items()]
        heapq.heapify(self._running)

    def run(self) -> Played:
        running, woken = self._running, self._woken
        while running:
            now = running[0][0]
            while running and running[0][0] == now:
                self._finish(*heapq.heappop(running))
            while woken:
                self._take(woken.pop(), now)
        if len(self._order) < len(self._begins):
            raise BlockedError
        return Played(self._begins, self._ends, self._order, self._free)

    def _finish(self, now: float, work: int) -> None:
        for rank in self._ranks[work] if work >= 0 else (-1 - work,):
            self._idle.add(rank)
            self._woken.add(rank)
            self._free[rank] = now
        for taker in self._takers[work] if work >= 0 else ():
            beginning = self._beginning_of[taker]
            self._lacks[beginning] -= 1
            if not self._lacks[beginning]:
                for able in self._together[beginning]:
                    self._woken.update(self._idle.intersection(self._ranks[able]))
                    if not self._ranks[able]:
                        self._begin(able, now)

    def _take(self, rank: int, now: float) -> None:
        """Lets a rank come to its next work, which begins when all have come to it."""
        for lane in self._lanes[rank]:
            if lane and not self._lacks[beginning := self._beginning_of[lane[-1]]]:
                lane.pop()
                self._idle.discard(rank)
                self._absent[beginning] -= 1
                if not self._absent[beginning]:
                    for work in self._together[beginning]:
                        self._begin(work, now)
                return

    def _begin(self, work: int, now: float) -> None:
        end = now + self._seconds[work]
        self._order.append(work)
        self._begins[work], self._ends[work] = now, end
        heapq.heappush(self._running, (end, work))
