"""Ranks that only encode fill the time until a step ends with encoder batches of later steps.

Only where the encoder is frozen. How far they come is a matter of time; what they make is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from flowtrain_lightning.packing.step_work import STEPS_AHEAD
from flowtrain_lightning.runtime.executor import Executor, RolePart
from flowtrain_lightning.runtime.step import RankContext, Step

Ahead = tuple[Step, int]
"""A later step, and the number of one of its encoder batches."""


class LaterSteps:
    """The encoder batches of later steps that a rank has published, of an encoder that is frozen.

    Args:
        context: what the rank works with.
        part: what it needs for the works of the encoder.
        role: the encoder.
    """

    def __init__(self, context: RankContext, part: RolePart, role: str) -> None:
        self._context = context
        self._parts: Mapping[str, RolePart] = {role: part}
        self._role = role
        self._executors: dict[tuple[str, int], Executor] = {}  # stage and step -> runs what is done ahead of it
        self._begun: dict[tuple[str, int], int] = {}  # stage and step -> the place of the first batch that is left

    def take(self, step: Step) -> int:
        """The place of the first batch that was not published ahead of a step, which begins now."""
        self._executors.pop((step.stage, step.index), None)
        return self._begun.pop((step.stage, step.index), 0)

    def find(self, later: Callable[[int], Step | None], steps_left: int) -> Ahead | None:
        """The next encoder batch of later steps, and its step; None where there is none within `STEPS_AHEAD`.

        Args:
            later: gives the n-th step after the one that runs, from 1; None past the end.
            steps_left: steps of this stage that will follow.
        """
        for distance in range(1, min(steps_left, STEPS_AHEAD) + 1):
            if (step := later(distance)) is None:
                return None
            begun = self._begun.get((step.stage, step.index), 0)
            place = next((place for place in step.program.roles[self._role].batches if place >= begun), None)
            if place is not None:
                return step, place
        return None

    def fits(self, step: Step, place: int) -> bool:
        """Whether there is room now for the rows of a batch of a later step."""
        specs = self._context.compute.specs
        if not specs.keys() >= set(step.program.modalities):  # of one that has not been seen yet
            return False
        if not self._parts[self._role].speaks:
            return True
        demand = step.program.pool_demand(specs).features[self._role]
        made = step.program.roles[self._role].batches[place].made
        return self._context.pool.fits([demand[each.entry].nbytes for each in made], ahead=True)

    def publish(self, step: Step, place: int) -> None:
        """Encodes and publishes what `find` found and `fits` has room for."""
        name = step.stage, step.index
        if name not in self._executors:
            self._executors[name] = Executor(self._context, self._parts, step)
        self._executors[name].publish_ahead(self._role, place)
        self._begun[name] = place + 1


class WorkAhead(Protocol):
    """The works of a rank until a step ends."""

    def __call__(self, is_over: bool) -> bool:
        """Does a piece of work of a later step, if it can now.

        Args:
            is_over: the report of the step that ends is here.

        Returns:
            whether to ask again before anything else arrives.
        """


class AheadAlone:
    """Of a rank that needs no other to encode: a batch whenever there is one, and room for it.

    Args:
        find: the next batch of later steps, if there is one.
        fits: whether there is room for its features.
        encode: encodes and publishes it.
    """

    def __init__(
        self, find: Callable[[], Ahead | None], fits: Callable[[Step, int], bool], encode: Callable[[Step, int], None]
    ) -> None:
        self._find, self._fits, self._encode = find, fits, encode

    def __call__(self, is_over: bool) -> bool:
        """See `WorkAhead`."""
        if is_over or (found := self._find()) is None or not self._fits(*found):
            return False
        self._encode(*found)
        return True


class AheadTogether:
    """Of ranks that need each other to encode: a batch when all of them have room for theirs and none has ended.

    They ask each other before each batch, so that all of them come to the same forwards, and then to the end of the
    step. It cannot block: a rank answers once it has room or the step is over; and the backbone can end the step
    without any of this, since all features that it reads were encoded before the first question.

    Args:
        find: see `AheadAlone`.
        fits: see there.
        encode: see there.
        sum_votes: sums a tensor over all of these ranks.
    """

    def __init__(
        self,
        find: Callable[[], Ahead | None],
        fits: Callable[[Step, int], bool],
        encode: Callable[[Step, int], None],
        sum_votes: Callable[[Tensor], Tensor],
    ) -> None:
        self._find, self._fits, self._encode = find, fits, encode
        self._sum_votes = sum_votes
        self._agreed_to_end = False

    def __call__(self, is_over: bool) -> bool:
        """See `WorkAhead`."""
        if self._agreed_to_end:
            return False
        found = self._find()
        if not is_over and found is not None and not self._fits(*found):
            return False
        over, able = self._sum_votes(torch.tensor([is_over, found is not None], dtype=torch.int64)).tolist()
        self._agreed_to_end = over > 0 or able == 0
        if not self._agreed_to_end and found is not None:
            self._encode(*found)
        return not self._agreed_to_end
