"""Whose turn it is on a rank with two lanes, where ranks need each other to compute and so must have one order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Lane = Literal["encoder", "backbone"]
"""What a rank does for one role."""


@dataclass(frozen=True)
class Turns:
    """In which order the two lanes of a rank work, where they may not take turns as they can go on.

    Ranks of a shard group gather weights together, so all of them must come to a forward or a backward in one order. By
    this rule nobody waits for what comes later: before a microbatch go the forwards of its position, on all ranks.
    Where ranks encode at different positions, all would wait at each for the one that does; so forwards go before the
    first microbatch and backwards after the last one, at the same time on all ranks, as far as activations may be kept.

    Attributes:
        positions: microbatches of each backbone rank.
        encoded: positions at which this rank has an encoder batch, ascending.
        ahead: encoder batches of one that trains whose forward may go before the microbatch that reads them, from 1.
    """

    positions: int
    encoded: tuple[int, ...]
    ahead: int

    def order(self, trains: bool) -> Iterator[Lane]:
        """Whose turn it is to do its next unit of work.

        Args:
            trains: the encoder has backwards.
        """
        encoder: Lane = "encoder"
        first = min(self.ahead, len(self.encoded)) if trains else len(self.encoded)
        yield from [encoder] * first
        # Each forward that is left makes use of what an earlier backward lets go of.
        left = deque(zip(self.encoded, self.encoded[first:], strict=False))
        for position in range(self.positions):
            while left and (left[0][1] <= position or (left[0][1] == position + 1 and left[0][0] < position)):
                left.popleft()  # where it can be, a microbatch early, so that features are there in time
                yield from (encoder, encoder)
            yield "backbone"
        if trains:
            yield from [encoder] * first
