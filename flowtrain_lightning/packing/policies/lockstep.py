"""The policy of members that gather weights together: all of them come to the same passes in one order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flowtrain_lightning.packing.step_graph import Pass


def lockstep_order(
    positions: Sequence[int], kept: int, until: Sequence[int] | None = None
) -> tuple[tuple[Pass, ...], frozenset[int]]:
    """The order in which encoder ranks that share weights work: alike on all that have the same turns.

    As in `forwards_first` a forward goes while activations may be kept, else the oldest backward does; and what has to
    be recomputed follows from the positions alone. A backward waits for the microbatches that read its batch, and these
    for every forward of their position: so a forward that finds no room beside others that cannot go backward yet keeps
    nothing. Where only one batch may be kept, nothing else is computed between its forward and its backward, which
    ZeRO-3 cannot do: none of several batches of a position is kept, nor one that later positions read, and what waits
    goes backward before the next position.

    Args:
        positions: ``[batches]`` of the microbatches that read each encoder batch, never falling.
        kept: batches whose activations may be kept at a time, from 1.
        until: ``[batches]`` of the last microbatches that read each; None: they are of one position.

    Returns:
        the works in order, and the numbers of the batches of which nothing is kept.
    """
    until = positions if until is None else until
    works: list[Pass] = []
    waiting, recomputed, held = deque[int](), set[int](), 0
    for number, position in enumerate(positions):
        while waiting and (held == kept or kept == 1) and until[waiting[0]] < position:
            oldest = waiting.popleft()
            held -= oldest not in recomputed
            works.append(("backward", oldest))
        alone = not waiting and until[number] == position and positions.count(position) == 1
        if held == kept or (kept == 1 and not alone):
            recomputed.add(number)
        else:
            held += 1
        waiting.append(number)
        works.append(("forward", number))
    return (*works, *(("backward", number) for number in waiting)), frozenset(recomputed)
