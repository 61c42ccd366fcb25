"""The policy of a trunk whose ranks hold several runs of layers each: interleaved 1F1B (Narayanan et al., 2104.04473).

Microbatches go in groups of as many as there are stages: a rank computes a group with its first chunk of layers, then
with the next one; backwards go the other way round. Which of both comes next is played once, with a forward of one time
unit and a backward of two: whoever can go on does, so the order that comes of it blocks for no number of microbatches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from flowtrain_lightning.packing.step_graph import Kind

_UNITS = {"forward": 1, "backward": 2}


class ChunkPass(NamedTuple):
    """A forward or a backward of a microbatch by one chunk of a stage's layers.

    Attributes:
        kind: of the pass.
        chunk: which run of layers of the stage.
        position: of the microbatch.
    """

    kind: Kind
    chunk: int
    position: int


@cache
def virtual_stage_orders(positions: int, stages: int, virtual: int) -> tuple[tuple[ChunkPass, ...], ...]:
    """The order of the passes of each stage.

    Args:
        positions: microbatches of a member.
        stages: of the trunk.
        virtual: chunks of layers of each stage; chunk ``c`` of stage ``s`` follows all chunks ``c`` of stages below it.
    """
    play = _Play(positions, stages, virtual)
    while play.goes_on():
        pass
    return tuple(map(tuple, play.orders))


class _Play:
    """The progress of all stages.

    Attributes:
        orders: ``[stage]`` the passes that each has begun.
    """

    def __init__(self, positions: int, stages: int, virtual: int) -> None:
        self._stages, self._virtual = stages, virtual
        self.orders: list[list[ChunkPass]] = [[] for _ in range(stages)]
        chunks = range(virtual)
        groups = [range(first, min(first + stages, positions)) for first in range(0, positions, stages)]
        forwards = [(chunk, position) for group in groups for chunk in chunks for position in group]
        backwards = [(chunk, position) for group in groups for chunk in reversed(chunks) for position in group]
        self._left: dict[Kind, list[Sequence[tuple[int, int]]]] = {
            "forward": [forwards] * stages,
            "backward": [backwards] * stages,
        }
        self._next: dict[Kind, list[int]] = {"forward": [0] * stages, "backward": [0] * stages}
        self._most = [2 * (stages - 1 - stage) + (virtual - 1) * stages + 1 for stage in range(stages)]
        self._done: set[tuple[Kind, int, int]] = set()  # kind, number of the virtual stage, position
        self._busy: list[bool] = [False] * stages
        self._ends: list[tuple[int, int, ChunkPass]] = []  # when, which stage, what
        self._now = 0

    def goes_on(self) -> bool:
        """Lets every stage begin what it can, and the next pass end; says whether something is left."""
        began = [self._begin(stage, limited=True) for stage in range(self._stages)]
        if not self._ends and not any(began):  # more may be open than in the long run
            began = [any(self._begin(stage, limited=False) for stage in range(self._stages))]
        if not self._ends:
            return False
        self._now, stage, done = heapq.heappop(self._ends)
        self._busy[stage] = False
        self._done.add((done.kind, done.chunk * self._stages + stage, done.position))
        return True

    def _begin(self, stage: int, *, limited: bool) -> bool:
        if self._busy[stage]:
            return False
        is_open = self._next["forward"][stage] - self._next["backward"][stage]
        kinds: tuple[Kind, ...] = ("forward", "backward")
        for kind in kinds:
            if kind == "forward" and limited and is_open >= self._most[stage]:
                continue
            number = self._next[kind][stage]
            if number < len(self._left[kind][stage]) and self._can(kind, stage, *self._left[kind][stage][number]):
                chunk, position = self._left[kind][stage][number]
                self._next[kind][stage] += 1
                self._busy[stage] = True
                begun = ChunkPass(kind, chunk, position)
                self.orders[stage].append(begun)
                heapq.heappush(self._ends, (self._now + _UNITS[kind], stage, begun))
                return True
        return False

    def _can(self, kind: Kind, stage: int, chunk: int, position: int) -> bool:
        number, last = chunk * self._stages + stage, self._stages * self._virtual - 1
        if kind == "forward":
            return number == 0 or ("forward", number - 1, position) in self._done
        own = ("forward", number, position) in self._done
        return own and (number == last or ("backward", number + 1, position) in self._done)
