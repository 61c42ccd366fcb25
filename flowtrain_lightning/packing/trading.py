"""Trading: a row whose costliest bin stands out gives it a slightly cheaper sample of another row's cheap bin."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.evening import even_out
from flowtrain_lightning.packing.plan import BoolArray, FloatArray, IntArray

_TRADES = 24
"""Trades per row, at most."""
_SWEEPS = 3
"""Times that rows trade and are evened out."""


def trade_and_even(
    bin_of: IntArray, free: BoolArray, width: int, tokens: IntArray, costs: FloatArray, bins: int, budget: int
) -> None:
    """Let rows trade samples, and even out what they have got, as long as that helps; see :func:`trade`."""
    for _ in range(_SWEEPS):
        if not trade(bin_of, free, width, tokens, costs, bins, budget):
            return
        even_out(bin_of, np.arange(bins) // width, bins // width, tokens, costs, bins, budget)


@compiled
def trade(
    bin_of: IntArray,
    free: BoolArray,
    width: int,
    tokens: IntArray,
    costs: FloatArray,
    bins: int,
    budget: int,
    tolerance: float = 2e-5,
) -> int:
    """Lower the costliest bins of rows by trades that make no row costlier; ``bin_of`` is changed in place.

    The costliest bin of a row takes a sample that is a little cheaper than the one that it gives away, from a bin of
    another row that has room for the difference below the costliest of its own.

    Args:
        bin_of: ``[samples]`` the bin of each sample, ``row * width + column``, or -1.
        free: ``[samples]`` whether each may change its row.
        width: bins of a row.
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` falling likewise.
        bins: number of bins.
        budget: the most tokens of a bin.
        tolerance: how far above its row's mean the costliest bin may stay, as a share of the mean.

    Returns:
        how many trades were made.
    """
    rows = bins // width
    fill = np.zeros(bins, dtype=np.int64)
    cost = np.zeros(bins, dtype=np.float64)
    for item in range(len(tokens)):
        if bin_of[item] >= 0:
            fill[bin_of[item]] += tokens[item]
            cost[bin_of[item]] += costs[item]
    top = np.empty(rows, dtype=np.float64)
    for row in range(rows):
        top[row] = cost[row * width : (row + 1) * width].max()
    trades = 0
    for _ in range(_TRADES):
        before = trades
        for row in range(rows):
            own = cost[row * width : (row + 1) * width]
            excess = top[row] - own.mean()
            if excess <= tolerance * own.mean():
                continue
            costliest = row * width + int(np.argmax(own))
            gap = top[row] - _second(own)
            given, taken = _best_trade(
                costliest, gap, excess, bin_of, free, width, tokens, costs, fill, cost, top, budget
            )
            if given < 0:
                continue
            other = bin_of[taken]
            bin_of[given], bin_of[taken] = other, costliest
            fill[other] += tokens[given] - tokens[taken]
            fill[costliest] -= tokens[given] - tokens[taken]
            cost[other] += costs[given] - costs[taken]
            cost[costliest] -= costs[given] - costs[taken]
            top[row] = own.max()
            trades += 1
        if trades == before:
            break
    return trades


@compiled
def _second(own: FloatArray) -> float:
    """The second largest of some numbers, which may equal the largest; 0 where there is one number."""
    return float(np.sort(own)[-2]) if len(own) > 1 else 0.0


@compiled
def _best_trade(
    costliest: int,
    gap: float,
    excess: float,
    bin_of: IntArray,
    free: BoolArray,
    width: int,
    tokens: IntArray,
    costs: FloatArray,
    fill: IntArray,
    cost: FloatArray,
    top: FloatArray,
    budget: int,
) -> tuple[int, int]:
    """The sample to give and the one to take, or -1 and -1: as near as can be to what the row can gain by it.

    The bin ``costliest`` gives. It is ``gap`` above the next one of its row, and more is no gain by itself; and
    ``excess`` above its row's mean.
    """
    best_given, best_taken, best_gain = -1, -1, 0.0
    row = costliest // width
    for given in range(len(tokens)):
        if bin_of[given] != costliest or not free[given]:
            continue
        for taken in range(given + 1, len(tokens)):
            other = bin_of[taken]
            difference = costs[given] - costs[taken]
            if other < 0 or difference <= 0.0 or other // width == row or not free[taken]:
                continue
            if difference > top[other // width] - cost[other]:
                continue
            if fill[other] + tokens[given] - tokens[taken] > budget:
                continue
            gain = min(difference, gap) + 0.01 * min(difference, excess)
            if gain > best_gain:
                best_given, best_taken, best_gain = given, taken, gain
    return best_given, best_taken
