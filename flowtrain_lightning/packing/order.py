"""The order of the microbatches within a step, and how much media each of them should read."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.evaluator import FORWARD_SHARE
from flowtrain_lightning.packing.plan import FloatArray, IntArray

_ROUNDS = 16
_REACH = 12
"""How far a position may move: the search stays linear in the number of positions, beyond this many."""
_QUANTA = 96
"""Parts in which a step's media are dealt to its positions."""
_NEAR = 0.02
"""Chains this much shorter than the longest one, as a share of the step, still count."""


def flow_order(media: IntArray | FloatArray) -> IntArray:
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


def fastest_order(cost: FloatArray, media: FloatArray) -> IntArray:
    """The order with the shortest step that exchanges and moves of positions find.

    Args:
        cost: ``[positions, lanes]`` what each costs the backbone; see :func:`rows_time`.
        media: ``[positions]`` what the media that it reads cost each encoder rank, forward and backward.

    Returns:
        ``[positions]`` the positions in their new order, never slower than that of :func:`flow_order`.
    """
    first = flow_order(media)
    begins = (first, first[::-1].copy(), np.argsort(-media, kind="stable").astype(np.int64))
    return min(
        (first, *(_improved(order, cost, media) for order in begins)),
        key=lambda order: float(rows_time(order, cost, media)),
    )


@compiled
def rows_time(order: IntArray, cost: FloatArray, media: FloatArray) -> float:
    """How long a step takes with media dealt evenly to the encoder ranks.

    Encoder ranks do all forwards first, then backwards as gradients come.

    Args:
        order: ``[positions]`` the order.
        cost: ``[positions, lanes]`` of the backbone. Lanes do not wait for each other: where ranks meet at every
            microbatch there is one, that of the slowest rank.
        media: ``[positions]`` of each encoder rank, forward and backward.
    """
    ends = np.zeros(len(order), dtype=np.float64)
    longest, encoder = 0.0, 0.0
    for lane in range(cost.shape[1]):
        now, encoder = 0.0, 0.0
        for place in range(len(order)):
            own = media[order[place]]
            if own > 0.0:
                encoder += own * FORWARD_SHARE
                now = max(now, encoder)
            now += cost[order[place], lane]
            ends[place] = max(ends[place], now)
        longest = max(longest, now)
    for place in range(len(order)):
        own = media[order[place]]
        if own > 0.0:
            encoder = max(encoder, ends[place]) + own * (1.0 - FORWARD_SHARE)
    return max(longest, encoder)


@compiled
def wanted_media(cost: FloatArray, media: FloatArray, least: FloatArray, most: FloatArray) -> FloatArray:
    """How much media each position should read for the step to be short.

    A step is as long as its longest chain: the forwards for all positions up to one, that position and the following
    ones on the backbone, and the backwards for all positions from another one on. Media move, a little at a time, from
    the position that long chains hold most of to the one that they hold least of.

    Args:
        cost: ``[positions, lanes]`` of the backbone, in order; see :func:`rows_time`.
        media: ``[positions]`` encoder cost on each encoder rank, forward and backward.
        least: ``[positions]`` as poor in media as each can be.
        most: ``[positions]`` as rich as each can be.

    Returns:
        ``[positions]`` the same media in all.
    """
    count = len(cost)
    order = np.arange(count)
    wanted, best = media.copy(), media.copy()
    mean = np.zeros(count, dtype=np.float64)
    total, span = 0.0, 0.0
    for position in range(count):
        for lane in range(cost.shape[1]):
            mean[position] += cost[position, lane] / cost.shape[1]
        total += media[position]
        span += mean[position]
    quantum = total / _QUANTA
    shortest = np.inf
    for _ in range(2 * _QUANTA):
        time = rows_time(order, cost, wanted)
        if time < shortest:
            shortest = time
            best[:] = wanted
        weight = _weight_in_chains(mean, wanted, time, _NEAR * max(span, total))
        giver, taker = -1, -1
        for position in range(count):
            if wanted[position] - quantum >= least[position] and (giver < 0 or weight[position] > weight[giver]):
                giver = position
            if wanted[position] + quantum <= most[position] and (
                taker < 0
                or weight[position] < weight[taker]
                or (weight[position] == weight[taker] and wanted[position] < wanted[taker])
            ):
                taker = position
        if giver < 0 or taker < 0 or weight[giver] <= weight[taker]:
            break
        wanted[giver] -= quantum
        wanted[taker] += quantum
    return best


@compiled
def _weight_in_chains(cost: FloatArray, media: FloatArray, time: float, near: float) -> FloatArray:
    """``[positions]`` by how much the long chains grow with the media of each."""
    count = len(cost)
    forward = np.zeros(count, dtype=np.float64)
    backward = np.zeros(count, dtype=np.float64)
    before = 0.0
    for first in range(count):
        before += media[first] * FORWARD_SHARE
        after = 0.0
        for last in range(first, count):
            after += media[last] * (1.0 - FORWARD_SHARE)
        between = 0.0
        for last in range(first, count):
            between += cost[last]
            share = max(0.0, 1.0 - (time - before - between - after) / near)
            forward[first] += share * share
            backward[last] += share * share
            after -= media[last] * (1.0 - FORWARD_SHARE)
    # A chain holds the forwards of all positions up to its first, and the backwards of all from its last on.
    weight = np.zeros(count, dtype=np.float64)
    held = 0.0
    for position in range(count - 1, -1, -1):
        held += forward[position]
        weight[position] += held * FORWARD_SHARE
    held = 0.0
    for position in range(count):
        held += backward[position]
        weight[position] += held * (1.0 - FORWARD_SHARE)
    return weight


@compiled
def _improved(order: IntArray, cost: FloatArray, media: FloatArray) -> IntArray:
    """Exchange two positions, or move one, as long as the step becomes shorter."""
    count = len(order)
    best = rows_time(order, cost, media)
    for _ in range(_ROUNDS):
        improved = False
        for first in range(count):
            for second in range(first + 1, min(count, first + 1 + _REACH)):
                for kind in range(3):
                    other = order.copy()
                    if kind == 0:
                        other[first], other[second] = order[second], order[first]
                    elif kind == 1:
                        other[first:second] = order[first + 1 : second + 1]
                        other[second] = order[first]
                    else:
                        other[first + 1 : second + 1] = order[first:second]
                        other[first] = order[second]
                    time = rows_time(other, cost, media)
                    if time < best * (1.0 - 1e-9):
                        order, best, improved = other, time, True
        if not improved:
            break
    return order
