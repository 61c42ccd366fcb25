"""What a block may take its samples from: those that wait, and those of the stream ahead."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flowtrain_lightning.packing.plan import IntArray


class Supply:
    """Samples that may be taken: those that wait, then those of the stream in order."""

    def __init__(
        self, old: IntArray, old_tokens: IntArray, old_drawn: IntArray, new_tokens: IntArray, first: int, step: int
    ) -> None:
        self.old, self.step = len(old), step
        self.samples = np.concatenate([old, np.arange(first, first + len(new_tokens), dtype=np.int64)])
        self.tokens = np.concatenate([old_tokens, new_tokens])
        self.drawn = np.concatenate([old_drawn, np.full(len(new_tokens), step, dtype=np.int64)])


def draw(lengths: Callable[[int, int], IntArray], start: int, wanted: float) -> tuple[IntArray, bool]:
    """Samples from ``start`` on with ``wanted`` tokens or a little more, and whether the stream ends in them."""
    found = lengths(start, start + 256)
    ended = len(found) < 256
    while not ended and found.sum() < wanted:
        more = int((wanted - found.sum()) / found.mean() * 1.02) + 64
        chunk = lengths(start + len(found), start + len(found) + more)
        ended = len(chunk) < more
        found = np.concatenate([found, chunk])
    if found.sum() < wanted:
        return found, True
    return found[: int(np.searchsorted(np.cumsum(found), wanted)) + 1], False
