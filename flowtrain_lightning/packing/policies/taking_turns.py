"""The policy of ranks of two roles that need each other to compute: whose turn it is is the same on all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from flowtrain_lightning.packing.step_graph import Kind

T = TypeVar("T")


class Due(NamedTuple):
    """When a pass of a role that is read is due.

    Attributes:
        kind: of the pass.
        position: of the batches that read what it is about.
    """

    kind: Kind
    position: int


def taking_turns(producer: Sequence[tuple[Due, T]], consumer: Sequence[Sequence[T]]) -> Iterator[T]:
    """In which order a rank of two roles works, where it may not do whatever it can go on with.

    Ranks of a shard group gather weights together, so all of them must come to a forward or a backward in one order. By
    this rule nobody waits for what comes later: before what the consumer does at a position go the forwards of that
    position, on all ranks. Where ranks produce at different positions, all would wait at each for the one that does; so
    forwards go before the first position and backwards after the last one, at the same time on all ranks, as far as
    activations may be kept.

    Args:
        producer: the passes of the roles that are read, in `lockstep_order`. What does not train is none of them: all
            its forwards go first.
        consumer: what the role that reads does at each position.
    """
    left = deque(producer)
    for position, works in enumerate(consumer):
        while (ready := _ready([due for due, _ in left], position)) > 0:
            yield from (left.popleft()[1] for _ in range(ready))
        yield from works
    yield from (work for _, work in left)


def _ready(left: Sequence[Due], position: int) -> int:
    """Counts the passes that go before a position: up to and with the next forward, or none.

    A forward goes before its position; where it can, a position earlier, so that its rows are there in time; and at
    once where no backward has to make room for it.
    """
    forward = next((count for count, due in enumerate(left) if due.kind == "forward"), None)
    if forward is None:
        return 0
    due = left[forward].position
    done = all(before.position < position for before in left[:forward])
    return forward + 1 if due <= position or (done and (not forward or due == position + 1)) else 0
