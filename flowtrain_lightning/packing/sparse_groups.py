"""Balance groups where only a few samples share a microbatch: like with like, then swaps between groups."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.bin_packing import best_fit
from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.load_balancing import Bins, fill_bins, rebalance
from flowtrain_lightning.packing.step_plan import BoolArray, FloatArray, IntArray

_LONG = 3
"""A sample that fits fewer times into a bin than this decides what can be beside it; shorter ones balance."""
_GRAIN = 0.3
"""Short samples make bins alike up to this share of the cost of the shortest."""
_USABLE = 0.98
"""Share of the free space of a bin that its group may count on: not every bit of it finds samples that fill it."""
_SWEEPS = 3
"""Times that groups swap samples and are rebalanced."""
_SWAPS = 24
"""Swaps per group, at most."""
_TOLERANCE = 2e-5
"""The costliest bin may stay above its group's mean by this share of it."""


@compiled
def match_groups(tokens: IntArray, costs: FloatArray, groups: int, group_size: int, budget: int) -> IntArray:
    """Long samples to as few bins as hold them, bins of like cost to one group, short samples to the groups' needs.

    Args:
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` falling.
        groups: number of groups.
        group_size: bins of a group.
        budget: the most tokens of a bin.

    Returns:
        ``[samples]`` the bin, ``group * group_size + slot``, or -1 where a sample fitted nowhere.
    """
    count, number_of_bins = len(tokens), groups * group_size
    long = 0
    while long < count and tokens[long] * _LONG > budget:
        long += 1
    bin_of = np.full(count, -1, dtype=np.int64)
    fitted, opened = best_fit(tokens[:long], budget, number_of_bins)
    bin_of[:long] = fitted
    bins = fill_bins(bin_of, tokens, costs, number_of_bins, budget)
    new_number = _group_bins(bins, opened, groups, group_size, _GRAIN * costs[count - 1])
    for item in range(long):
        if fitted[item] >= 0:
            bin_of[item] = new_number[fitted[item]]
    bins = fill_bins(bin_of, tokens, costs, number_of_bins, budget)
    short = 0.0
    for item in range(long, count):
        short += costs[item]
    level = _levels(bins, groups, group_size, short)
    fill, load = bins.fill, bins.load
    for item in range(long, count):
        best = -1
        largest = 0.0
        for number in range(number_of_bins):
            missing = level[number // group_size] - load[number] - costs[item]
            if fill[number] + tokens[item] > budget:
                continue
            if best < 0 or missing > largest:
                best = number
                largest = missing
        if best >= 0:
            bin_of[item] = best
            fill[best] += tokens[item]
            load[best] += costs[item]
            level[best // group_size] = max(level[best // group_size], load[best])
    return bin_of


@compiled
def _group_bins(bins: Bins, used: int, groups: int, group_size: int, grain: float) -> IntArray:
    """Group bins that are neighbours in cost, with empty bins where costs jump, so that they idle least.

    A dynamic program over how many used and how many empty bins the groups so far hold.

    Args:
        bins: all bins, with the long samples in them.
        used: bins with samples, which are the first ones.
        groups: number of groups.
        group_size: bins of a group.
        grain: how exactly short samples make up a difference in cost, an empty bin's included.

    Returns:
        ``[bins]`` the new number of each bin.
    """
    order = np.argsort(bins.fill[:used] - bins.load[:used], kind="mergesort")
    empty = groups * group_size - used
    least = np.full((used + 1, empty + 1), np.inf)  # idle time after so many used and so many empty bins
    taken = np.zeros((used + 1, empty + 1), dtype=np.int64)
    least[0, 0] = 0.0
    for start in range(used + 1):
        top = 0.0
        for own in range(min(group_size, used - start) + 1):
            if own > 0:
                top = max(top, bins.load[order[start + own - 1]])
            added = group_size - own
            idle = added * max(grain, top - _USABLE * bins.budget) if own > 0 else 0.0
            for number in order[start : start + own]:
                gap = top - bins.load[number]
                idle += min(gap, max(grain, gap - _USABLE * (bins.budget - bins.fill[number])))
            for before in range(empty - added + 1):
                whole_groups = (start + before) % group_size == 0
                if whole_groups and least[start, before] + idle < least[start + own, before + added]:
                    least[start + own, before + added] = least[start, before] + idle
                    taken[start + own, before + added] = own
    new_number = np.empty(groups * group_size, dtype=np.int64)
    new_number[used:] = -1
    end, number = used, groups * group_size
    spare = groups * group_size
    while number > 0:
        own = taken[end, number - end]
        for slot in range(own):
            end -= 1
            new_number[order[end]] = number - group_size + slot
        for slot in range(own, group_size):
            spare -= 1
            new_number[spare] = number - group_size + slot
        number -= group_size
    return new_number


@compiled
def _levels(bins: Bins, groups: int, group_size: int, short: float) -> FloatArray:
    """``[groups]`` the cost that short samples, which cost ``short`` together, are to bring the bins of each to.

    They bring every bin up to the costliest of its group. What is left of them fills whole groups, those with the most
    free space first, so that all other groups stay as alike as they are.
    """
    top = np.zeros(groups, dtype=np.float64)
    most = np.full(groups, np.inf)
    total = np.zeros(groups, dtype=np.float64)
    for group in range(groups):
        for number in range(group * group_size, (group + 1) * group_size):
            top[group] = max(top[group], bins.load[number])
            most[group] = min(most[group], bins.load[number] + _USABLE * (bins.budget - bins.fill[number]))
            total[group] += bins.load[number]
    for group in range(groups):
        short -= group_size * top[group] - total[group]
    level: FloatArray = top.copy()
    for group in np.argsort(top - most, kind="mergesort"):
        more = min(max(0.0, short), group_size * max(0.0, most[group] - level[group]))
        level[group] += more / group_size
        short -= more
    return level


def swap_and_rebalance(
    bin_of: IntArray, free: BoolArray, tokens: IntArray, costs: FloatArray, groups: int, group_size: int, budget: int
) -> None:
    """Swap samples between groups, and rebalance these, as long as that helps; see :func:`swap_between_groups`."""
    for _ in range(_SWEEPS):
        if not swap_between_groups(bin_of, free, tokens, costs, groups, group_size, budget):
            return
        rebalance(bin_of, tokens, costs, groups, group_size, budget)


@compiled
def swap_between_groups(
    bin_of: IntArray, free: BoolArray, tokens: IntArray, costs: FloatArray, groups: int, group_size: int, budget: int
) -> int:
    """Lower the costliest bins of groups by swaps that make no group costlier; ``bin_of`` is changed in place.

    The costliest bin of a group takes a sample that is a little cheaper than the one that it gives away, from a bin of
    another group whose cost stays below the costliest of its own.

    Args:
        bin_of: ``[samples]`` the bin of each sample, ``group * group_size + slot``, or -1.
        free: ``[samples]`` whether each may change its group.
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` falling.
        groups: number of groups.
        group_size: bins of a group.
        budget: the most tokens of a bin.

    Returns:
        how many swaps were made.
    """
    bins = fill_bins(bin_of, tokens, costs, groups * group_size, budget)
    top = np.empty(groups, dtype=np.float64)
    for group in range(groups):
        top[group] = bins.load[group * group_size : (group + 1) * group_size].max()
    swaps = 0
    for _ in range(_SWAPS):
        before = swaps
        for group in range(groups):
            own = bins.load[group * group_size : (group + 1) * group_size]
            mean = _mean(own)
            excess = top[group] - mean
            if excess <= _TOLERANCE * mean:
                continue
            costliest = group * group_size + int(np.argmax(own))
            gap = top[group] - _second_largest(own)
            given, taken = _best_swap(bins, free, top, group_size, costliest, gap, excess)
            if given < 0:
                continue
            other = bin_of[taken]
            bin_of[given], bin_of[taken] = other, costliest
            bins.fill[other] += tokens[given] - tokens[taken]
            bins.fill[costliest] -= tokens[given] - tokens[taken]
            bins.load[other] += costs[given] - costs[taken]
            bins.load[costliest] -= costs[given] - costs[taken]
            top[group] = own.max()
            swaps += 1
        if swaps == before:
            break
    return swaps


@compiled
def _mean(values: FloatArray) -> float:
    total = 0.0
    for value in values:  # by hand: NumPy's sums add in another order than compiled ones
        total += value
    return total / len(values)


@compiled
def _second_largest(values: FloatArray) -> float:
    """The second largest value, which may equal the largest; 0 where there is only one."""
    return float(np.sort(values)[-2]) if len(values) > 1 else 0.0


@compiled
def _best_swap(
    bins: Bins, free: BoolArray, top: FloatArray, group_size: int, costliest: int, gap: float, excess: float
) -> tuple[int, int]:
    """The sample to give and the one to take, or -1 and -1: those whose difference suits the giving group best.

    Args:
        bins: all bins.
        free: ``[samples]`` whether each may change its group.
        top: ``[groups]`` cost of the costliest bin of each.
        group_size: bins of a group.
        costliest: the bin that gives.
        gap: by how much it is above the next one of its group; to lower it by more is no gain by itself.
        excess: by how much it is above its group's mean.
    """
    bin_of, tokens, costs = bins.bin_of, bins.tokens, bins.costs
    fill, load = bins.fill, bins.load
    best_given, best_taken, best_gain = -1, -1, 0.0
    own_group = costliest // group_size
    for given in range(len(tokens)):
        if bin_of[given] != costliest or not free[given]:
            continue
        for taken in range(given + 1, len(tokens)):
            other = bin_of[taken]
            difference = costs[given] - costs[taken]
            if other < 0 or difference <= 0.0 or other // group_size == own_group or not free[taken]:
                continue
            if difference > top[other // group_size] - load[other]:
                continue
            if fill[other] + tokens[given] - tokens[taken] > bins.budget:
                continue
            gain = min(difference, gap) + 0.01 * min(difference, excess)
            if gain > best_gain:
                best_given, best_taken, best_gain = given, taken, gain
    return best_given, best_taken
