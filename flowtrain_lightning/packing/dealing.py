"""Media to encoder ranks, alike in cost over the whole step: an inner loop."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.plan import FloatArray, IntArray
from flowtrain_lightning.packing.splitting import split_evenly

_EXCHANGES = 32


@compiled
def deal_media(costs: FloatArray, order: IntArray, home: IntArray, ranks: int) -> IntArray:
    """Each media, in ``order``, to the rank with the least cost so far; then the last differences are evened out.

    Args:
        costs: ``[media]`` encoder cost.
        order: ``[media]`` by the position that reads, and by falling cost inside a position: so the media that a
            position waits for are alike on all ranks too.
        home: ``[media]`` the rank on which a media stays unless balance moves it, or -1.
        ranks: encoder ranks.

    Returns:
        ``[media]`` the encoder rank of each.
    """
    rank_of = home.copy()
    load = np.zeros(ranks, dtype=np.float64)
    for media in order:
        best = rank_of[media]
        if best < 0:
            best = 0
            for rank in range(1, ranks):
                if load[rank] < load[best]:
                    best = rank
        rank_of[media] = best
        load[best] += costs[media]
    for _ in range(_EXCHANGES * ranks):
        top, low, total = 0, 0, 0.0
        for rank in range(ranks):
            total += load[rank]
            if load[rank] > load[top]:
                top = rank
            if load[rank] < load[low]:
                low = rank
        gap = load[top] - load[low]
        if load[top] * ranks <= total * (1.0 + 1e-4):
            break
        moved = _exchange(rank_of, costs, order, top, low, gap)
        if moved <= 0.0:
            moved = _share_out(rank_of, costs, top, low, gap)
        if moved <= 0.0:
            break
        load[top] -= moved
        load[low] += moved
    return rank_of


@compiled
def _exchange(rank_of: IntArray, costs: FloatArray, order: IntArray, top: int, low: int, gap: float) -> float:
    """Move one media, or exchange two neighbours in order, so that ``gap`` shrinks most; the cost moved."""
    best_gain, best_give, best_take = 1e-6 * gap, -1, -1
    last = -1
    for media in order:
        if rank_of[media] == low:
            last = media
        elif rank_of[media] == top:
            for take in (-1, last):
                moved = costs[media] - (costs[take] if take >= 0 else 0.0)
                gain = min(moved, gap - moved)
                if gain > best_gain:
                    best_gain, best_give, best_take = gain, media, take
    if best_give < 0:
        return 0.0
    rank_of[best_give] = low
    if best_take < 0:
        return float(costs[best_give])
    rank_of[best_take] = top
    return float(costs[best_give] - costs[best_take])


@compiled
def _share_out(rank_of: IntArray, costs: FloatArray, top: int, low: int, gap: float) -> float:
    """Share the cheapest media of two ranks out anew so that ``gap`` shrinks most; the cost moved."""
    falling = np.argsort(-costs, kind="mergesort")
    sorted_costs, sorted_ranks = costs[falling], rank_of[falling]
    ours, theirs = np.flatnonzero(sorted_ranks == top), np.flatnonzero(sorted_ranks == low)
    nothing = np.zeros(len(costs), dtype=np.int64)
    moved = 0.0
    for place in split_evenly(ours, theirs, nothing, sorted_costs, nothing[:2], 0, gap):
        media = falling[place]
        moved += costs[media] if rank_of[media] == top else -costs[media]
        rank_of[media] = low if rank_of[media] == top else top
    return moved
