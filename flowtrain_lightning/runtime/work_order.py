"""The rules by which a rank orders its forwards and backwards, where ranks work alone and where they share weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
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
