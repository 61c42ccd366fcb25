"""The policy of ranks of two roles that need each other to compute: whose turn it is is the same on all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flowtrain_lightning.packing.policies.lockstep import lockstep_order
from flowtrain_lightning.packing.step_graph import Pass

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

    def _ready(self, works: Sequence[Pass], position: int) -> int:
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
