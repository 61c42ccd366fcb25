"""Samples to rows where only a few share a microbatch: like to like, then the short ones to even out; an inner loop."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.fitting import best_fit
from flowtrain_lightning.packing.plan import FloatArray, IntArray

_LONG = 3
"""A sample that fits fewer times into a bin than this decides what can be beside it; shorter ones even out."""
_GRAIN = 0.3
"""How exactly short samples make bins alike, as a share of the cost of the shortest."""
_TIGHT = 0.98
"""Share of the room of a bin that its row may count on: not every bit of it finds samples that fill it."""


@compiled
def fitting_count(tokens: IntArray, bins: int, budget: int) -> int:
    """How many of the first ``tokens`` best fit brings into ``bins`` bins of ``budget``."""
    total = np.cumsum(tokens)
    low = int(np.searchsorted(total, (bins - 1) * budget // 2, side="right"))
    high = int(np.searchsorted(total, bins * budget, side="right")) + 1
    while high - low > 1:
        count = (low + high) // 2
        falling = -np.sort(-tokens[:count])
        _, opened = best_fit(falling, budget, count)
        if opened <= bins:
            low = count
        else:
            high = count
    return low


@compiled
def group_rows(tokens: IntArray, costs: FloatArray, rows: int, width: int, budget: int) -> IntArray:
    """Long samples to as few bins as hold them, bins that cost alike to one row, short samples to the rows' needs.

    Args:
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` cost of each, falling likewise.
        rows: number of rows.
        width: bins of a row.
        budget: the most tokens of a bin.

    Returns:
        ``[samples]`` the bin, ``row * width + column``, or -1 where no room was found.
    """
    count, bins = len(tokens), rows * width
    long = 0
    while long < count and tokens[long] * _LONG > budget:
        long += 1
    fitted, opened = best_fit(tokens[:long], budget, bins)
    bin_of = np.full(count, -1, dtype=np.int64)
    fill = np.zeros(bins, dtype=np.int64)
    cost = np.zeros(bins, dtype=np.float64)
    for item in range(long):
        if fitted[item] >= 0:
            fill[fitted[item]] += tokens[item]
            cost[fitted[item]] += costs[item]
    place = _rows_of_alike(fill, cost, opened, rows, width, budget, _GRAIN * costs[count - 1])
    fill[:] = 0
    cost[:] = 0.0
    for item in range(long):
        if fitted[item] >= 0:
            chosen = place[fitted[item]]
            bin_of[item] = chosen
            fill[chosen] += tokens[item]
            cost[chosen] += costs[item]
    short = 0.0
    for item in range(long, count):
        short += costs[item]
    level = _levels(fill, cost, rows, width, budget, short)
    for item in range(long, count):
        best = -1
        gap = 0.0
        for number in range(bins):
            own = level[number // width] - cost[number] - costs[item]
            if fill[number] + tokens[item] > budget:
                continue
            if best < 0 or own > gap:
                best = number
                gap = own
        if best >= 0:
            bin_of[item] = best
            fill[best] += tokens[item]
            cost[best] += costs[item]
            level[best // width] = max(level[best // width], cost[best])
    return bin_of


@compiled
def _rows_of_alike(
    fill: IntArray, cost: FloatArray, used: int, rows: int, width: int, budget: int, grain: float
) -> IntArray:
    """``[bins]`` the new number of each bin: neighbours in cost are in one row, and empty bins where costs jump.

    Args:
        fill: ``[bins]`` tokens of long samples.
        cost: ``[bins]``; the first ``used`` of them are not empty.
        used: bins with samples.
        rows: number of rows.
        width: bins of a row.
        budget: the most tokens of a bin.
        grain: how exactly short samples make up a difference, an empty bin's included.
    """
    order = np.argsort(fill[:used] - cost[:used], kind="mergesort")
    empty = rows * width - used
    least = np.full((used + 1, empty + 1), np.inf)  # after so many used and so many empty bins, all in whole rows
    taken = np.zeros((used + 1, empty + 1), dtype=np.int64)
    least[0, 0] = 0.0
    for start in range(used + 1):
        top = 0.0
        for own in range(min(width, used - start) + 1):
            if own > 0:
                top = max(top, cost[order[start + own - 1]])
            added = width - own
            idle = added * max(grain, top - _TIGHT * budget) if own > 0 else 0.0
            for number in order[start : start + own]:
                gap = top - cost[number]
                idle += min(gap, max(grain, gap - _TIGHT * (budget - fill[number])))
            for before in range(empty - added + 1):
                if (start + before) % width == 0 and least[start, before] + idle < least[start + own, before + added]:
                    least[start + own, before + added] = least[start, before] + idle
                    taken[start + own, before + added] = own
    place = np.empty(rows * width, dtype=np.int64)
    place[used:] = -1
    end, number = used, rows * width
    spare = rows * width
    while number > 0:
        own = taken[end, number - end]
        for column in range(own):
            end -= 1
            place[order[end]] = number - width + column
        for column in range(own, width):
            spare -= 1
            place[spare] = number - width + column
        number -= width
    return place


@compiled
def _levels(fill: IntArray, cost: FloatArray, rows: int, width: int, budget: int, short: float) -> FloatArray:
    """``[rows]`` the cost that short samples are to bring the bins of each to.

    They bring every bin up to the costliest of its row; what is left of them fills whole rows, those with the most
    room first, so that all other rows stay as alike as they are.
    """
    top = np.zeros(rows, dtype=np.float64)
    most = np.full(rows, np.inf)
    total = np.zeros(rows, dtype=np.float64)
    for row in range(rows):
        for column in range(row * width, (row + 1) * width):
            top[row] = max(top[row], cost[column])
            most[row] = min(most[row], cost[column] + _TIGHT * (budget - fill[column]))
            total[row] += cost[column]
    for row in range(rows):
        short -= width * top[row] - total[row]
    level = top.copy()
    for row in np.argsort(top - most, kind="mergesort"):
        more = min(max(0.0, short), width * max(0.0, most[row] - level[row]))
        level[row] += more / width
        short -= more
    return level
