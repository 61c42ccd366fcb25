"""The policy of stages that split their backwards: zero bubble (Qi et al., 2401.10241 and 2405.15362), played greedily.

Nobody waits for gradients of weights, so a stage makes them when it would wait. Which comes when is played once, with a
unit of time for each of the three passes. On every stage as many microbatches keep activations as 1F1B keeps on the
first one. With as many microbatches as stages or more, a step waits a third as long as 1F1B, and a quarter in a V.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import cache

from flowtrain_lightning.packing.policies.virtual_stages import ChunkPass
from flowtrain_lightning.packing.stage_schedule import StageSchedule
from flowtrain_lightning.packing.step_graph import Kind

_KINDS: tuple[Kind, ...] = ("forward", "backward", "weights")


@cache
def zero_bubble_orders(positions: int, pipeline: StageSchedule) -> tuple[tuple[ChunkPass, ...], ...]:
    """The order of the passes of each stage. Of each chunk positions never fall, in passes of one kind.

    Args:
        positions: microbatches of a member.
        pipeline: its stages.
    """
    play = _Play(positions, pipeline)
    while play.goes_on():
        pass
    return tuple(map(tuple, play.orders))


class _Play:
    """The progress of all stages.

    Attributes:
        orders: ``[stage]`` the passes that each has begun.
    """

    def __init__(self, positions: int, pipeline: StageSchedule) -> None:
        self._positions, self._pipeline = positions, pipeline
        self.orders: list[list[ChunkPass]] = [[] for _ in range(pipeline.stages)]
        self._begun = [{kind: [0] * pipeline.chunks for kind in _KINDS} for _ in range(pipeline.stages)]
        self._done: set[tuple[Kind, int, int]] = set()  # kind, number of the chunk, position
        self._busy = [False] * pipeline.stages
        self._ends: list[tuple[int, int]] = []  # when, which stage
        self._now = 0

    def goes_on(self) -> bool:
        """Lets every stage begin what it can, and those that are next end; says whether something is left."""
        stages = range(self._pipeline.stages)
        began = [self._begin(stage, limited=True) for stage in stages]
        if not self._ends and not any(began):  # more may be open than in the long run
            any(self._begin(stage, limited=False) for stage in stages)
        if not self._ends:
            return False
        self._now = self._ends[0][0]
        while self._ends and self._ends[0][0] == self._now:
            _, stage = heapq.heappop(self._ends)
            kind, chunk, position = self.orders[stage][-1]
            self._busy[stage] = False
            self._done.add((kind, self._pipeline.number(stage, chunk), position))
        return True

    def _begin(self, stage: int, *, limited: bool) -> bool:
        if self._busy[stage]:
            return False
        begun = self._begun[stage]
        for kind in self._wanted(stage, limited=limited):
            ready = [chunk for chunk in range(self._pipeline.chunks) if self._can(kind, stage, chunk)]
            if ready:
                # Weights in the order of microbatches, so that what is kept for them goes; else the deepest layers.
                first = min(begun[kind][chunk] for chunk in ready) if kind == "weights" else None
                chunk = max(chunk for chunk in ready if first is None or begun[kind][chunk] == first)
                self.orders[stage].append(ChunkPass(kind, chunk, begun[kind][chunk]))
                begun[kind][chunk] += 1
                self._busy[stage] = True
                heapq.heappush(self._ends, (self._now + 1, stage))
                return True
        return False

    def _wanted(self, stage: int, *, limited: bool) -> Iterator[Kind]:
        """What a stage does if it can, the first first."""
        forwards, backwards, weights = (sum(self._begun[stage][kind]) for kind in _KINDS)
        has_room = forwards - weights < self._pipeline.runs or not limited
        if self._pipeline.chunks == 1:  # 1F1B, in which a stage is as many microbatches late with weights as its number
            if has_room and forwards - backwards < self._pipeline.stages - stage:
                yield "forward"
            if backwards - weights > stage:
                yield "weights"
        yield "backward"
        if has_room:
            yield "forward"
        yield "weights"

    def _can(self, kind: Kind, stage: int, chunk: int) -> bool:
        position, number = self._begun[stage][kind][chunk], self._pipeline.number(stage, chunk)
        if position == self._positions:
            return False
        if kind == "forward":
            return number == 0 or ("forward", number - 1, position) in self._done
        if kind == "weights":
            return ("backward", number, position) in self._done
        own = ("forward", number, position) in self._done
        return own and (number == self._pipeline.runs - 1 or ("backward", number + 1, position) in self._done)
