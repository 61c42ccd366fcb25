"""Two bins shared out anew: the best way to split their samples, by trying all; an inner loop for few samples."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.plan import FloatArray, IntArray

MOST_SPLIT = 12
"""Samples that are shared out at most; of more, the shortest, and the others stay."""


@compiled
def split_evenly(
    ours: IntArray, theirs: IntArray, tokens: IntArray, costs: FloatArray, fill: IntArray, budget: int, gap: float
) -> IntArray:
    """Which of two bins' samples should change sides so that the bins cost the same.

    Args:
        ours: samples of the costlier bin, the longest first.
        theirs: samples of the other.
        tokens: ``[samples]`` of all samples.
        costs: ``[samples]`` likewise.
        fill: ``[2]`` tokens of either bin.
        budget: the most tokens of a bin.
        gap: by how much the first bin costs more.

    Returns:
        The samples that change sides; none where nothing is gained.
    """
    kept = min(len(ours) + len(theirs), MOST_SPLIT)
    items = np.empty(kept, dtype=np.int64)
    is_ours = np.empty(kept, dtype=np.bool_)
    first, second = len(ours) - 1, len(theirs) - 1
    for number in range(kept):
        take = second < 0 or (first >= 0 and ours[first] > theirs[second])
        is_ours[number] = take
        if take:
            items[number] = ours[first]
            first -= 1
        else:
            items[number] = theirs[second]
            second -= 1
    moves = np.zeros(kept, dtype=np.bool_)
    best = np.zeros(kept, dtype=np.bool_)
    moved, shifted = 0.0, 0
    least = 0.5 * gap * (1.0 - 1e-6)
    for trial in range(1, 1 << kept):
        # A Gray code: from one trial to the next a single sample changes sides.
        number = 0
        while not (trial >> number) & 1:
            number += 1
        sign = 1 if is_ours[number] != moves[number] else -1
        moves[number] = not moves[number]
        moved += sign * costs[items[number]]
        shifted += sign * tokens[items[number]]
        off = abs(0.5 * gap - moved)
        if off < least and fill[1] + shifted <= budget and fill[0] - shifted <= budget:
            least = off
            best[:] = moves
    return items[best]
