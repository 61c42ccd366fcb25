"""The rules by which a rank orders its work: forwards and backwards of one lane, and whose turn it is of two lanes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Work = tuple[Literal["forward", "backward"], int]
"""One unit of an encoder lane's work: what is done with the encoder batch of this number."""


def encoder_order(batches: Sequence[int], kept: int, recomputed: Collection[int]) -> Iterable[Work]:
    """The order in which a trainable encoder works: forward while activations may be kept, else the oldest backward.

    Args:
        batches: numbers of the encoder batches, in order.
        kept: batches whose activations may be kept at a time.
        recomputed: batches of which nothing is kept; with those that `recomputed_batches` names, nothing can block.
    """
    forwards, backwards = deque(batches), deque[int]()
    held = 0
    while forwards or backwards:
        if forwards and (forwards[0] in recomputed or held < kept):
            number = forwards.popleft()
            backwards.append(number)
            held += number not in recomputed
            yield "forward", number
        else:
            number = backwards.popleft()
            held -= number not in recomputed
            yield "backward", number


def lockstep_order(positions: Sequence[int], ahead: int) -> Iterable[Work]:
    """The order in which encoder ranks that share weights work: some forwards, then backwards and forwards in turn.

    Args:
        positions: of the encoder batches, ascending.
        ahead: forwards that go before the first backward, from 1.
    """
    yield from (("forward", position) for position in positions[:ahead])
    for number, position in enumerate(positions):
        yield "backward", position
        if number + ahead < len(positions):
            yield "forward", positions[number + ahead]


Lane = Literal["encoder", "backbone"]
"""What a rank does for one role."""


@dataclass(frozen=True)
class LaneOrder:
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
        """The lane that does its next unit of work, one after the other.

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
