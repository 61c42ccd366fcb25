"""The rows of a step so that encoder and backbone wait little for each other: their order, and what each reads."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.evening import even_out
from flowtrain_lightning.packing.exchange import exchange_media
from flowtrain_lightning.packing.microbatches import SyncEvery, level_ranks
from flowtrain_lightning.packing.order import fastest_order, rows_time
from flowtrain_lightning.packing.plan import FloatArray, IntArray

_MOVABLE = 0.01
"""Where rows are even, samples with more attention than this share of a microbatch stay: their row is their like."""
_ENOUGH = 1e-3
"""A step this near to the work of its busiest lane, as a share of it, stays as it is."""
_UNEVENNESS = 2e-4
"""Share by which the backbone's time may grow through exchanges, as rows become less even."""
_SLACK = 80
"""Tokens by which two microbatches may come to differ through one exchange, where rows are to stay even."""


def flow_rows(
    bin_of: IntArray,
    tokens: IntArray,
    costs: FloatArray,
    encoder: FloatArray,
    *,
    rows: int,
    ranks: int,
    encoder_ranks: int,
    budget: int,
    sync_every: SyncEvery,
) -> IntArray:
    """Order the rows of a step, and let samples of different rows change places where that makes the step shorter.

    An exchange is between microbatches of one rank; where ranks meet at every microbatch, of samples that have about as
    many tokens, so that rows stay even.

    Args:
        bin_of: ``[samples]`` the microbatch of each, ``row * ranks + rank``.
        tokens: ``[samples]`` of each.
        costs: ``[samples]`` backbone cost of each.
        encoder: ``[samples]`` encoder cost of each, in the unit of ``costs``, forward and backward.
        rows: rows of the step.
        ranks: backbone ranks.
        encoder_ranks: ranks that share the encoder cost.
        budget: the most tokens of a microbatch.
        sync_every: when ranks wait for each other.

    Returns:
        ``[samples]`` the microbatch of each, ``position * ranks + rank``.
    """
    encoder = encoder / encoder_ranks
    if sync_every == "step":
        bin_of = _alike_rows(bin_of, costs, encoder, rows, ranks)
    cost, media = _per_row(bin_of, costs, encoder, rows, ranks, sync_every)
    order = fastest_order(cost, media)
    time = rows_time(order, cost, media)
    longest = cost.sum(axis=0).max()
    if time > max(longest, media.sum()) * (1 + _ENOUGH):
        found = _exchanged(bin_of, order, tokens, costs, encoder, cost, rows, ranks, budget, sync_every)
        new_cost, new_media = _per_row(found, costs, encoder, rows, ranks, sync_every)
        new_order = fastest_order(new_cost, new_media)
        new_longest = new_cost.sum(axis=0).max()
        if rows_time(new_order, new_cost, new_media) < time and new_longest <= longest * (1 + _UNEVENNESS):
            bin_of, order = found, new_order
    place = np.empty(rows, dtype=np.int64)
    place[order] = np.arange(rows)
    return place[bin_of // ranks] * ranks + bin_of % ranks


def _per_row(
    bin_of: IntArray, costs: FloatArray, encoder: FloatArray, rows: int, ranks: int, sync_every: SyncEvery
) -> tuple[FloatArray, FloatArray]:
    """``[rows, lanes]`` time on the backbone, and ``[rows]`` on each encoder rank."""
    loads: FloatArray = np.bincount(bin_of, costs, minlength=rows * ranks).astype(np.float64)
    media: FloatArray = np.bincount(bin_of // ranks, encoder, minlength=rows).astype(np.float64)
    grid = loads.reshape(rows, ranks)
    return grid.max(axis=1, keepdims=True) if sync_every == "microbatch" else grid, media


def _alike_rows(bin_of: IntArray, costs: FloatArray, encoder: FloatArray, rows: int, ranks: int) -> IntArray:
    """Where ranks need not meet, each may have its own order: by rising media, if that makes the step shorter."""
    per_bin = np.bincount(bin_of, encoder, minlength=rows * ranks).reshape(rows, ranks)
    place = np.argsort(np.argsort(per_bin, axis=0, kind="stable"), axis=0)
    other: IntArray = (place * ranks + np.arange(ranks)).ravel()[bin_of]
    times = []
    for bins in (bin_of, other):
        cost, media = _per_row(bins, costs, encoder, rows, ranks, "step")
        times.append(rows_time(fastest_order(cost, media), cost, media))
    return other if times[1] < times[0] else bin_of


def _exchanged(
    bin_of: IntArray,
    order: IntArray,
    tokens: IntArray,
    costs: FloatArray,
    encoder: FloatArray,
    cost: FloatArray,
    rows: int,
    ranks: int,
    budget: int,
    sync_every: SyncEvery,
) -> IntArray:
    found = bin_of.copy()
    by_density, slack = np.lexsort((-tokens, encoder / costs)), budget
    if sync_every == "microbatch":
        # Attention: what a sample costs beyond the like number of the cheapest tokens.
        attention = costs - (costs / tokens).min() * tokens
        by_density, slack = by_density[attention[by_density] <= _MOVABLE * cost.mean()], _SLACK
    exchange_media(found, order, by_density, tokens, encoder, cost[order], ranks, budget, slack)
    if sync_every == "microbatch":
        falling = np.argsort(-tokens, kind="stable")
        evened = found[falling]
        bins = rows * ranks
        even_out(evened, np.arange(bins) // ranks, rows, tokens[falling], costs[falling], bins, budget)
        found[falling] = level_ranks(evened, costs[falling], rows, ranks)
    return found
