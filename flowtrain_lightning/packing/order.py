"""The order of the microbatches within a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flowtrain_lightning.packing.plan import IntArray

_ROUNDS = 3
_REACH = 4
"""How far apart the positions of an exchange may be: the search stays linear in the number of positions."""


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


def fastest_order(order: IntArray, time_of: Callable[[IntArray], float]) -> IntArray:
    """Exchange positions, two at a time, as long as the step becomes shorter.

    Args:
        order: ``[positions]`` the order to begin with.
        time_of: how long a step takes in an order.

    Returns:
        ``[positions]`` an order that no single exchange shortens, or the best after a few rounds.
    """
    best = time_of(order)
    for _ in range(_ROUNDS):
        improved = False
        for first in range(len(order)):
            for second in range(first + 1, min(len(order), first + 1 + _REACH)):
                other = order.copy()
                other[[first, second]] = other[[second, first]]
                time = time_of(other)
                if time < best * (1 - 1e-9):
                    order, best, improved = other, time, True
        if not improved:
            break
    return order
