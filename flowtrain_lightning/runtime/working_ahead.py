"""How ranks that only encode fill the time until a step ends with encoder batches of later steps.

Only where the encoder is frozen. How far they come is a matter of time; what they make is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from flowtrain_lightning.runtime.schedule import Step

Ahead = tuple[Step, int]
"""A later step, and the number of one of its encoder batches."""


class WorkAhead(Protocol):
    """What a rank does until a step ends."""

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
