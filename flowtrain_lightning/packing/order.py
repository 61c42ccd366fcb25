"""The order of the microbatches within a step."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.plan import IntArray


def flow_order(media: IntArray) -> IntArray:
    """Positions with little media go first and last, those with much into the middle.

    So the backbone has work while the first features are on their way, and the encoder does its last backward
    while the backbone still computes.

    Args:
        media: ``[positions]`` how much media (patches of all ranks together) each position of the step reads.

    Returns:
        ``[positions]`` the positions in their new order; the same for every rank, as ranks that share a layer meet at
        every microbatch.
    """
    ascending = np.argsort(media, kind="stable").astype(np.int64)
    return np.concatenate([ascending[0::2], ascending[1::2][::-1]])
