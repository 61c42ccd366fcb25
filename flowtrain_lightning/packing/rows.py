"""Samples to rows of microbatches whose members cost alike: the dense filling of rows, an inner loop."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.plan import FloatArray, IntArray

_LONG_SHARE = 0.83
"""How much of a row the longest samples take; the shortest fill the rest, and so even it out."""
_HEADROOM = 0.998
"""Of the budget: a bin that is filled to the last token leaves nothing to even out with."""
_SHORT_SHARE = 0.2
"""Share of the tokens from which rows of many samples are filled up, each from samples of all these lengths."""
_MANY = 4
"""Times that the longest sample of such a row fits into a bin; rows of fewer are filled up with the very shortest."""
_MISSES = 256
"""Samples that find no room in a row before the row takes no more long ones."""


@compiled
def fill_rows(tokens: IntArray, costs: FloatArray, density: float, rows: int, width: int, budget: int) -> IntArray:
    """Fill one row after another: first with the longest samples that are left, then with the shortest.

    So long samples meet their like in a row, and the bins of a row may cost the same although the token budget holds:
    a bin with more attention than its neighbours would have to hold fewer tokens than they do. Inside a row the long
    samples go to the bin with the least attention, the short ones to the cheapest. Rows of many samples share the short
    ones evenly: samples of two lengths alone could not be evened out.

    Args:
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` cost of each sample; longer ones cost no less per token.
        density: cost of a token of the shortest sample, above 0; what a sample costs beyond it is its *excess*.
        rows: rows to fill.
        width: bins of a row.
        budget: the most tokens of a bin.

    Returns:
        ``[samples]`` the bin, ``row * width + column``, or -1 where no room was found.
    """
    count = len(tokens)
    bin_of = np.full(count, -1, dtype=np.int64)
    follower = np.arange(count + 1)
    fill = np.zeros(width, dtype=np.int64)
    cost = np.zeros(width, dtype=np.float64)
    left = 0
    for item in range(count):
        left += tokens[item]
    short = np.arange(count - 1, -1, -1)
    used = 0
    has_many = False
    for row in range(rows):
        wanted = min(left / (rows - row), float(width * budget))
        longest = first_free(follower, 0)
        if longest < count and not has_many and tokens[longest] * _MANY <= budget:
            has_many = True
            used = 0
            _mix(short, bin_of, tokens, rows - row, _SHORT_SHARE * left)
        fill[:] = 0
        cost[:] = 0.0
        _take_longest(bin_of, follower, fill, cost, tokens, costs, density, row * width, wanted, budget)
        used = _take_shortest(
            bin_of, follower, fill, cost, tokens, costs, density, row * width, wanted, budget, short, used
        )
        for column in range(width):
            left -= fill[column]
    return bin_of


@compiled
def first_free(follower: IntArray, item: int) -> int:
    """The first sample from ``item`` on that is in no bin; paths are shortened on the way."""
    root = item
    while follower[root] != root:
        root = follower[root]
    while follower[item] != root:
        following = follower[item]
        follower[item] = root
        item = following
    return root


@compiled
def _take_longest(
    bin_of: IntArray,
    follower: IntArray,
    fill: IntArray,
    cost: FloatArray,
    tokens: IntArray,
    costs: FloatArray,
    density: float,
    first: int,
    wanted: float,
    budget: int,
) -> None:
    count, width = len(tokens), len(fill)
    placed = 0
    total_excess = 0.0
    highest = 0.0
    misses = 0
    item = first_free(follower, 0)
    while item < count and misses < _MISSES:
        level = (density * wanted + total_excess) / width
        if placed >= _LONG_SHARE * wanted and (level >= highest or placed >= 0.99 * width * budget):
            break
        excess = costs[item] - density * tokens[item]
        shared = (total_excess + excess) / width
        best = _least_attention(fill, cost, tokens[item], costs[item], density, shared, highest, budget)
        if best < 0:
            misses += 1
        else:
            _put(item, best, first, bin_of, follower, fill, cost, tokens, costs)
            placed += tokens[item]
            total_excess += excess
            highest = max(highest, cost[best])
        item = first_free(follower, item + 1)


@compiled
def _least_attention(
    fill: IntArray,
    cost: FloatArray,
    tokens: int,
    costs: float,
    density: float,
    shared_excess: float,
    highest: float,
    budget: int,
) -> int:
    """The bin of a row with the least excess that a sample of these tokens and costs may go to, or -1."""
    width = len(fill)
    # The cost that all bins of the row can reach together; a bin above it would only be waited for.
    reach = max(highest, density * 0.99 * budget + shared_excess)
    for column in range(width):
        if budget - fill[column] < tokens:  # short samples alone will fill this bin
            reach = min(reach, max(highest, cost[column] + density * (_HEADROOM * budget - fill[column])))
    best = -1
    least = 0.0
    for column in range(width):
        if budget - fill[column] < tokens or (fill[column] > 0 and cost[column] + costs > reach):
            continue
        own = cost[column] - density * fill[column]
        if best < 0 or own < least or (own == least and cost[column] < cost[best]):
            best = column
            least = own
    return best


@compiled
def _take_shortest(
    bin_of: IntArray,
    follower: IntArray,
    fill: IntArray,
    cost: FloatArray,
    tokens: IntArray,
    costs: FloatArray,
    density: float,
    first: int,
    wanted: float,
    budget: int,
    short: IntArray,
    used: int,
) -> int:
    demand = _demand(fill, cost, density, wanted, budget)
    chosen = np.empty(len(short) - used, dtype=np.int64)
    size = 0
    taken = 0.0
    while used < len(short) and taken < demand:
        item = short[used]
        if bin_of[item] < 0:
            if taken + 0.5 * tokens[item] > demand:
                break
            taken += tokens[item]
            chosen[size] = item
            size += 1
        used += 1
    for item in np.sort(chosen[:size]):
        best = -1
        for column in range(len(fill)):
            if budget - fill[column] >= tokens[item] and (best < 0 or cost[column] < cost[best]):
                best = column
        if best >= 0:
            _put(item, best, first, bin_of, follower, fill, cost, tokens, costs)
    return used


@compiled
def _demand(fill: IntArray, cost: FloatArray, density: float, wanted: float, budget: int) -> float:
    """Tokens of short samples that bring all bins of a row to one cost, as far as the budget allows."""
    width = len(fill)
    total_excess = 0.0
    least = cost[0] - density * fill[0]
    highest = 0.0
    for column in range(width):  # by hand: NumPy's sums add in another order than compiled ones
        excess = cost[column] - density * fill[column]
        total_excess += excess
        least = min(least, excess)
        highest = max(highest, cost[column])
    level = min((density * wanted + total_excess) / width, density * _HEADROOM * budget + least)
    level = max(level, highest)
    demand = 0.0
    for column in range(width):
        demand += min(max(0.0, (level - cost[column]) / density), float(budget - fill[column]))
    return demand


@compiled
def _put(
    item: int,
    column: int,
    first: int,
    bin_of: IntArray,
    follower: IntArray,
    fill: IntArray,
    cost: FloatArray,
    tokens: IntArray,
    costs: FloatArray,
) -> None:
    """Put a sample into a column of the row whose first bin is ``first``."""
    bin_of[item] = first + column
    follower[item] = item + 1
    fill[column] += tokens[item]
    cost[column] += costs[item]


@compiled
def _mix(short: IntArray, bin_of: IntArray, tokens: IntArray, rows: int, share: float) -> None:
    """Reorder the samples that fill rows so that each of ``rows`` rows is filled with samples of all short lengths."""
    count = len(tokens)
    free = np.empty(count, dtype=np.int64)
    size = 0
    tail = 0.0
    item = count - 1
    while item >= 0 and tail <= share:
        if bin_of[item] < 0:
            free[size] = item
            size += 1
            tail += tokens[item]
        item -= 1
    place = 0
    for offset in range(rows):
        for number in range(offset, size, rows):
            short[place] = free[number]
            place += 1
    while item >= 0:
        short[place] = item
        place += 1
        item -= 1
    short[place:] = count - 1
