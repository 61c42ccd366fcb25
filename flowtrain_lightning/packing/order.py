"""The order of the positions within a step, so that encoder and backbone wait little for each other."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.load_balancing import rebalance
from flowtrain_lightning.packing.media_swaps import swap_for_media
from flowtrain_lightning.packing.microbatches import balance_totals
from flowtrain_lightning.packing.simulator import closed_form_time
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray, SyncEvery

_ROUNDS = 16
"""Times that all moves and swaps of positions are tried."""
_REACH = 12
"""Farthest move of a position: beyond this many positions the search stays linear in their number."""
_MOVABLE = 0.01
"""Where positions are balanced, samples with more attention than this share of a microbatch stay with their like."""
_ENOUGH = 1e-3
"""A step this near to the work of its busiest lane, as a share of it, stays as it is."""
_UNEVENNESS = 2e-4
"""Share by which the backbone's time may grow through swaps, as positions become less even."""
_SLACK = 80
"""Tokens by which two microbatches may come to differ through one swap, where positions are to stay even."""


def order_step(
    bin_of: IntArray,
    tokens: IntArray,
    costs: FloatArray,
    encoder: FloatArray,
    *,
    positions: int,
    ranks: int,
    encoder_ranks: int,
    budget: int,
    sync_every: SyncEvery,
) -> IntArray:
    """Order the positions of a step, and swap samples between positions where that makes the step shorter.

    Swaps are between microbatches of one rank; where ranks synchronise at every microbatch, of samples that have about
    as many tokens, so that positions stay even.

    Args:
        bin_of: ``[samples]`` the microbatch of each, ``position * ranks + rank``.
        tokens: ``[samples]`` of each.
        costs: ``[samples]`` backbone cost of each.
        encoder: ``[samples]`` encoder cost of each, forward and backward, in the unit of ``costs``.
        positions: microbatches of each rank.
        ranks: backbone ranks.
        encoder_ranks: ranks that share the encoder cost.
        budget: the most tokens of a microbatch.
        sync_every: how often ranks wait for each other.

    Returns:
        ``[samples]`` the microbatch of each, ``position * ranks + rank``.
    """
    encoder = encoder / encoder_ranks
    if sync_every == "step":
        bin_of = _order_each_rank(bin_of, costs, encoder, positions, ranks)
    cost, media = _position_times(bin_of, costs, encoder, positions, ranks, sync_every)
    order = fastest_order(cost, media)
    time = closed_form_time(order, cost, media)
    longest = cost.sum(axis=0).max()
    if time > max(longest, media.sum()) * (1 + _ENOUGH):
        found = _swapped(bin_of, order, tokens, costs, encoder, cost, positions, ranks, budget, sync_every)
        new_cost, new_media = _position_times(found, costs, encoder, positions, ranks, sync_every)
        new_order = fastest_order(new_cost, new_media)
        new_longest = new_cost.sum(axis=0).max()
        is_shorter = closed_form_time(new_order, new_cost, new_media) < time
        if is_shorter and new_longest <= longest * (1 + _UNEVENNESS):
            bin_of, order = found, new_order
    new_position = np.empty(positions, dtype=np.int64)
    new_position[order] = np.arange(positions)
    return new_position[bin_of // ranks] * ranks + bin_of % ranks


def _position_times(
    bin_of: IntArray, costs: FloatArray, encoder: FloatArray, positions: int, ranks: int, sync_every: SyncEvery
) -> tuple[FloatArray, FloatArray]:
    """``[positions, lanes]`` time on the backbone, and ``[positions]`` on each encoder rank."""
    loads: FloatArray = np.bincount(bin_of, costs, minlength=positions * ranks).astype(np.float64)
    media: FloatArray = np.bincount(bin_of // ranks, encoder, minlength=positions).astype(np.float64)
    grid = loads.reshape(positions, ranks)
    return grid.max(axis=1, keepdims=True) if sync_every == "microbatch" else grid, media


def _order_each_rank(bin_of: IntArray, costs: FloatArray, encoder: FloatArray, positions: int, ranks: int) -> IntArray:
    """Where ranks synchronise once a step, each may have its own order: by rising media, if the step gets shorter."""
    per_bin = np.bincount(bin_of, encoder, minlength=positions * ranks).reshape(positions, ranks)
    new_position = np.argsort(np.argsort(per_bin, axis=0, kind="stable"), axis=0)
    other: IntArray = (new_position * ranks + np.arange(ranks)).ravel()[bin_of]
    times = []
    for bins in (bin_of, other):
        cost, media = _position_times(bins, costs, encoder, positions, ranks, "step")
        times.append(closed_form_time(fastest_order(cost, media), cost, media))
    return other if times[1] < times[0] else bin_of


def _swapped(
    bin_of: IntArray,
    order: IntArray,
    tokens: IntArray,
    costs: FloatArray,
    encoder: FloatArray,
    cost: FloatArray,
    positions: int,
    ranks: int,
    budget: int,
    sync_every: SyncEvery,
) -> IntArray:
    """The microbatches after swaps that bring media to where the step wants them, rebalanced."""
    found: IntArray = bin_of.copy()
    by_density, slack = np.lexsort((-tokens, encoder / costs)), budget
    if sync_every == "microbatch":
        # Attention: what a sample costs beyond as many of the cheapest tokens.
        attention = costs - (costs / tokens).min() * tokens
        by_density, slack = by_density[attention[by_density] <= _MOVABLE * cost.mean()], _SLACK
    swap_for_media(found, order, by_density, tokens, encoder, cost[order], ranks, budget, slack)
    if sync_every == "microbatch":
        falling = np.argsort(-tokens, kind="stable")
        balanced = found[falling]
        rebalance(balanced, tokens[falling], costs[falling], positions, ranks, budget)
        found[falling] = balance_totals(balanced, costs[falling], positions, ranks)
    return found


def media_order(media: IntArray | FloatArray) -> IntArray:
    """Positions with little media go first and last, those with much into the middle.

    So the backbone has work while the first features are on their way, and the encoder does its last backward
    while the backbone still computes.

    Args:
        media: ``[positions]`` how much media (patches of all ranks together) each position of the step reads.

    Returns:
        ``[positions]`` the positions in their new order.
    """
    ascending = np.argsort(media, kind="stable").astype(np.int64)
    return np.concatenate([ascending[0::2], ascending[1::2][::-1]])


def fastest_order(cost: FloatArray, media: FloatArray) -> IntArray:
    """The order with the shortest step that a local search by moves and swaps of positions finds.

    Args:
        cost: ``[positions, lanes]`` what each costs the backbone; see :func:`closed_form_time`.
        media: ``[positions]`` what the media that each reads cost every encoder rank, forward and backward.

    Returns:
        ``[positions]`` the positions in their new order, never slower than that of :func:`media_order`.
    """
    first = media_order(media)
    begins = (first, first[::-1].copy(), np.argsort(-media, kind="stable").astype(np.int64))
    return min(
        (first, *(_improved(order, cost, media) for order in begins)),
        key=lambda order: float(closed_form_time(order, cost, media)),
    )


@compiled
def _improved(order: IntArray, cost: FloatArray, media: FloatArray) -> IntArray:
    """Swap two positions, or move one, as long as the step becomes shorter."""
    count = len(order)
    best = closed_form_time(order, cost, media)
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
                    time = closed_form_time(other, cost, media)
                    if time < best * (1.0 - 1e-9):
                        order, best, improved = other, time, True
        if not improved:
            break
    return order
