"""Balance groups where many samples share a microbatch: one group is filled after another, dense and alike in cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.load_balancing import Bins
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray

_LONG_SHARE = 0.83
"""Share of a group that the longest samples take; the shortest fill the rest, and so balance it."""
_HEADROOM = 0.998
"""Of the budget: a bin that is filled to the last token leaves nothing to balance with."""
_DENSE = 0.99
"""Share of the budgets of its bins up to which a group is filled for sure."""
_SHORT_SHARE = 0.2
"""Share of the tokens from which groups of many samples are filled up, each from samples of all these lengths."""
_MANY = 4
"""Times that the longest sample of such a group fits into a bin; groups of fewer get the very shortest."""
_MISSES = 256
"""Samples that fit into no bin of a group before the group takes no more long ones."""


class _Group(NamedTuple):
    """The group that is being filled.

    Attributes:
        first: its first bin.
        end: the bin behind its last one.
        wanted: tokens that it should hold.
        density: cost of a token of the shortest sample, above 0. What a sample costs beyond that is its *excess*: the
            attention to more than a short sample has.
        next_free: ``[samples + 1]`` a sample from which on to look for one that is in no bin; see :func:`_first_free`.
    """

    first: int
    end: int
    wanted: float
    density: float
    next_free: IntArray


@compiled
def fill_groups(tokens: IntArray, costs: FloatArray, groups: int, group_size: int, budget: int) -> IntArray:
    """Fill one group after another: first with the longest samples that are left, then with the shortest.

    So long samples share a group with their like, and its bins can cost the same although the token budget holds: a bin
    with more attention than its neighbours would have to hold fewer tokens than they do. Inside a group the long
    samples go to the bin with the least attention, the short ones to the cheapest. Groups of many samples share the
    short ones evenly, since samples of two lengths alone could not be balanced.

    Args:
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` of each; longer ones cost no less per token.
        groups: groups to fill.
        group_size: bins of a group.
        budget: the most tokens of a bin.

    Returns:
        ``[samples]`` the bin, ``group * group_size + slot``, or -1 where a sample fitted nowhere.
    """
    count = len(tokens)
    fill, load = np.zeros(groups * group_size, dtype=np.int64), np.zeros(groups * group_size, dtype=np.float64)
    bins = Bins(np.full(count, -1, dtype=np.int64), tokens, costs, fill, load, budget)
    next_free = np.arange(count + 1)
    density = _least_density(tokens, costs)
    left = 0
    for item in range(count):
        left += tokens[item]
    short = np.arange(count - 1, -1, -1)
    used = 0
    has_many = False
    for number in range(groups):
        wanted = min(left / (groups - number), float(group_size * budget))
        longest = _first_free(next_free, 0)
        if longest < count and not has_many and tokens[longest] * _MANY <= budget:
            has_many = True
            used = 0
            _mix(short, bins, groups - number, _SHORT_SHARE * left)
        group = _Group(number * group_size, (number + 1) * group_size, wanted, density, next_free)
        _take_longest(bins, group)
        used = _take_shortest(bins, group, short, used)
        for chosen in range(group.first, group.end):
            left -= fill[chosen]
    return bins.bin_of


@compiled
def _least_density(tokens: IntArray, costs: FloatArray) -> float:
    """Cost of a token of the shortest sample that has any; 1 where there is none."""
    for item in range(len(tokens) - 1, -1, -1):
        if tokens[item] > 0:
            return float(costs[item] / tokens[item])
    return 1.0


@compiled
def _first_free(next_free: IntArray, item: int) -> int:
    """The first sample from ``item`` on that is in no bin; paths are shortened on the way (union-find)."""
    root = item
    while next_free[root] != root:
        root = next_free[root]
    while next_free[item] != root:
        following = next_free[item]
        next_free[item] = root
        item = following
    return root


@compiled
def _put(item: int, chosen: int, bins: Bins, group: _Group) -> None:
    bins.bin_of[item] = chosen
    group.next_free[item] = item + 1
    bins.fill[chosen] += bins.tokens[item]
    bins.load[chosen] += bins.costs[item]


@compiled
def _take_longest(bins: Bins, group: _Group) -> None:
    """Put the longest samples into the group until they are their share of it, and short ones can balance it."""
    size = group.end - group.first
    placed = 0
    total_excess = 0.0
    highest = 0.0
    misses = 0
    item = _first_free(group.next_free, 0)
    while item < len(bins.tokens) and misses < _MISSES:
        level = (group.density * group.wanted + total_excess) / size
        if placed >= _LONG_SHARE * group.wanted and (level >= highest or placed >= _DENSE * size * bins.budget):
            break
        excess = bins.costs[item] - group.density * bins.tokens[item]
        chosen = _least_excess(item, (total_excess + excess) / size, highest, bins, group)
        if chosen < 0:
            misses += 1
        else:
            _put(item, chosen, bins, group)
            placed += bins.tokens[item]
            total_excess += excess
            highest = max(highest, bins.load[chosen])
        item = _first_free(group.next_free, item + 1)


@compiled
def _least_excess(item: int, shared_excess: float, highest: float, bins: Bins, group: _Group) -> int:
    """The bin of the group with the least excess that a sample may go to, or -1.

    Args:
        item: the sample.
        shared_excess: excess of each bin with this sample, were it shared evenly.
        highest: cost of the group's costliest bin.
        bins: all bins.
        group: the group.
    """
    fill, load, budget = bins.fill, bins.load, bins.budget
    tokens, costs = bins.tokens[item], bins.costs[item]
    # The cost that all bins of the group can reach together; the others would only wait for a bin above it.
    reach = max(highest, group.density * _DENSE * budget + shared_excess)
    for number in range(group.first, group.end):
        free = budget - fill[number]
        if free < tokens:  # short samples alone will fill this bin
            headroom = _HEADROOM * budget - fill[number]
            reach = min(reach, max(highest, load[number] + group.density * headroom))
    best = -1
    least = 0.0
    for number in range(group.first, group.end):
        if budget - fill[number] < tokens:
            continue
        if fill[number] > 0 and load[number] + costs > reach:
            continue
        own = load[number] - group.density * fill[number]
        if best < 0 or own < least or (own == least and load[number] < load[best]):
            best = number
            least = own
    return best


@compiled
def _take_shortest(bins: Bins, group: _Group, short: IntArray, used: int) -> int:
    """Put short samples into the group's cheapest bins until they cost the same; how many of ``short`` are used."""
    demand = _demand(bins, group)
    chosen = np.empty(len(short) - used, dtype=np.int64)
    size = 0
    taken = 0.0
    while used < len(short) and taken < demand:
        item = short[used]
        if bins.bin_of[item] < 0:
            if taken + 0.5 * bins.tokens[item] > demand:
                break
            taken += bins.tokens[item]
            chosen[size] = item
            size += 1
        used += 1
    for item in np.sort(chosen[:size]):
        best = -1
        for number in range(group.first, group.end):
            fits = bins.budget - bins.fill[number] >= bins.tokens[item]
            if fits and (best < 0 or bins.load[number] < bins.load[best]):
                best = number
        if best >= 0:
            _put(item, best, bins, group)
    return used


@compiled
def _demand(bins: Bins, group: _Group) -> float:
    """Tokens of short samples that bring all bins of the group to one cost, as far as the budget allows."""
    fill, load, budget, density = bins.fill, bins.load, bins.budget, group.density
    total_excess = 0.0
    least = load[group.first] - density * fill[group.first]
    highest = 0.0
    for number in range(group.first, group.end):  # by hand: NumPy's sums add in another order than compiled ones
        excess = load[number] - density * fill[number]
        total_excess += excess
        least = min(least, excess)
        highest = max(highest, load[number])
    level = (density * group.wanted + total_excess) / (group.end - group.first)
    level = max(min(level, density * _HEADROOM * budget + least), highest)
    demand = 0.0
    for number in range(group.first, group.end):
        missing = max(0.0, (level - load[number]) / density)
        demand += min(missing, float(budget - fill[number]))
    return demand


@compiled
def _mix(short: IntArray, bins: Bins, groups: int, share: float) -> None:
    """Reorder the samples that fill groups up, so that each of ``groups`` groups gets samples of all short lengths.

    Args:
        short: ``[samples]`` the samples in the order in which they fill up; changed in place.
        bins: all bins.
        groups: groups that are still to be filled.
        share: tokens of the short samples that are mixed.
    """
    count = len(bins.tokens)
    free = np.empty(count, dtype=np.int64)
    size = 0
    tail = 0.0
    item = count - 1
    while item >= 0 and tail <= share:
        if bins.bin_of[item] < 0:
            free[size] = item
            size += 1
            tail += bins.tokens[item]
        item -= 1
    end = 0
    for offset in range(groups):
        for number in range(offset, size, groups):
            short[end] = free[number]
            end += 1
    while item >= 0:
        short[end] = item
        end += 1
        item -= 1
    short[end:] = count - 1
