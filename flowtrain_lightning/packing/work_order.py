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


def lockstep_order(positions: Sequence[int], kept: int) -> tuple[tuple[Work, ...], frozenset[int]]:
    """The order in which encoder ranks that share weights work: alike on all that have the same turns.

    As in `encoder_order` a forward goes while activations may be kept, else the oldest backward does; and what has to
    be recomputed follows from the positions alone. A backward waits for the microbatches of its position, and these for
    every forward of it: so a forward that finds no room beside others of its own position keeps nothing. Where only
    one batch may be kept, nothing else is computed between its forward and its backward, which ZeRO-3 cannot do: none
    of several batches of a position is kept, and what waits goes backward before the next position.

    Args:
        positions: ``[batches]`` of the microbatches that read each encoder batch, never falling.
        kept: batches whose activations may be kept at a time, from 1.

    Returns:
        the works in order, and the numbers of the batches of which nothing is kept.
    """
    works: list[Work] = []
    waiting, recomputed, held = deque[int](), set[int](), 0
    for number, position in enumerate(positions):
        while waiting and (held == kept or kept == 1) and positions[waiting[0]] < position:
            oldest = waiting.popleft()
            held -= oldest not in recomputed
            works.append(("backward", oldest))
        if held == kept or (kept == 1 and positions.count(position) > 1):
            recomputed.add(number)
        else:
            held += 1
        waiting.append(number)
        works.append(("forward", number))
    return (*works, *(("backward", number) for number in waiting)), frozenset(recomputed)


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
        encoded: ``[batches]`` the position of the microbatches that read each encoder batch of this rank.
        kept: encoder batches of one that trains whose activations may be kept at a time, from 1.
    """

    positions: int
    encoded: tuple[int, ...]
    kept: int

    def order(self, trains: bool) -> Iterator[Lane]:
        """The lane that does its next unit of work, one after the other.

        Args:
            trains: the encoder has backwards, and so works in `lockstep_order`.
        """
        encoder: Lane = "encoder"
        backbone: Lane = "backbone"
        if not trains:
            yield from [encoder] * len(self.encoded)
            yield from [backbone] * self.positions
            return
        works = deque(lockstep_order(self.encoded, self.kept)[0])
        for position in range(self.positions):
            while (ready := self._ready(works, position)) > 0:
                yield from [encoder] * ready
                for _ in range(ready):
                    works.popleft()
            yield backbone
        yield from [encoder] * len(works)

    def _ready(self, works: Sequence[Work], position: int) -> int:
        """How many works go before the microbatch of a position: up to and with the next forward, or none.

        A forward goes before the microbatches of its position; where it can, a microbatch earlier, so that features are
        there in time; and at once where no backward has to make room for it.
        """
        forward = next((count for count, (kind, _) in enumerate(works) if kind == "forward"), None)
        if forward is None:
            return 0
        due = self.encoded[works[forward][1]]
        done = all(self.encoded[works[count][1]] < position for count in range(forward))
        return forward + 1 if due <= position or (done and (not forward or due == position + 1)) else 0
