"""Rebalancing: samples move or swap bins until the costliest bin of each group is no longer above the others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray

_SWAPS = 64
"""Moves and swaps per group, at most."""
_PARTITIONS = 8
"""Two-way partitions per group, at most."""
_FEW = 10
"""Samples per bin of a group above which moves and swaps alone balance it."""
_MOST_PARTITIONED = 12
"""Samples that a two-way partition weighs; of more, the shortest, and the others stay."""


class Bins(NamedTuple):
    """Samples in bins; arrays that the functions here change in place.

    Attributes:
        bin_of: ``[samples]`` the bin of each sample, or -1.
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` falling.
        fill: ``[bins]`` tokens of each bin.
        load: ``[bins]`` cost of each bin.
        budget: the most tokens of a bin.
    """

    bin_of: IntArray
    tokens: IntArray
    costs: FloatArray
    fill: IntArray
    load: FloatArray
    budget: int


@compiled
def fill_bins(bin_of: IntArray, tokens: IntArray, costs: FloatArray, count: int, budget: int) -> Bins:
    """The ``count`` bins that ``bin_of`` says, with what is in them; all three arrays are ``[samples]``, see `Bins`."""
    fill, load = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.float64)
    for item in range(len(tokens)):
        if bin_of[item] >= 0:
            fill[bin_of[item]] += tokens[item]
            load[bin_of[item]] += costs[item]
    return Bins(bin_of, tokens, costs, fill, load, budget)


@compiled
def move(bins: Bins, item: int, target: int) -> None:
    """Move a sample from its bin to another one."""
    source = bins.bin_of[item]
    bins.bin_of[item] = target
    bins.fill[source] -= bins.tokens[item]
    bins.fill[target] += bins.tokens[item]
    bins.load[source] -= bins.costs[item]
    bins.load[target] += bins.costs[item]


@compiled
def rebalance(
    bin_of: IntArray,
    tokens: IntArray,
    costs: FloatArray,
    groups: int,
    group_size: int,
    budget: int,
    tolerance: float = 2e-5,
) -> None:
    """Balance the cost of the bins inside each group; ``bin_of`` is changed in place.

    Args:
        bin_of: ``[samples]`` the bin of each sample, ``group * group_size + slot``, or -1.
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` falling.
        groups: number of groups.
        group_size: bins of a group, which are to cost alike.
        budget: the most tokens of a bin; nothing that moves exceeds it.
        tolerance: how far above its group's mean the costliest bin may stay, as a share of the mean.
    """
    bins = fill_bins(bin_of, tokens, costs, groups * group_size, budget)
    start = np.zeros(groups + 1, dtype=np.int64)
    for item in range(len(tokens)):
        if bin_of[item] >= 0:
            start[bin_of[item] // group_size + 1] += 1
    for group in range(groups):
        start[group + 1] += start[group]
    members = np.empty(start[groups], dtype=np.int64)
    end = start[:groups].copy()
    for item in range(len(tokens)):
        if bin_of[item] >= 0:
            group = bin_of[item] // group_size
            members[end[group]] = item
            end[group] += 1
    for group in range(groups):
        own = np.arange(group * group_size, (group + 1) * group_size)
        _rebalance_group(bins, members[start[group] : start[group + 1]], own, tolerance)


@compiled
def _rebalance_group(bins: Bins, members: IntArray, own: IntArray, tolerance: float) -> None:
    size = len(own)
    partitions = _PARTITIONS if len(members) <= _FEW * size else 0
    for _ in range(_SWAPS):
        own = own[np.argsort(bins.load[own], kind="mergesort")]
        top = own[size - 1]
        total = 0.0
        for number in own:
            total += bins.load[number]
        if bins.load[top] * size <= total * (1.0 + tolerance):
            return
        if _swap_with_cheapest(bins, members, own):
            continue
        if partitions == 0:
            return
        partitions -= 1
        if not _partition_with_cheap(bins, members, own):
            return


@compiled
def _swap_with_cheapest(bins: Bins, members: IntArray, own: IntArray) -> bool:
    """Move a sample from the costliest bin to the cheapest one that gains by it, or swap two; False if none does.

    Args:
        bins: all bins.
        members: the group's samples, rising.
        own: the group's bins by rising cost.
    """
    top = own[len(own) - 1]
    ours = members[bins.bin_of[members] == top]
    for other in own[: len(own) - 1]:
        item, back = _best_swap(bins, ours, members[bins.bin_of[members] == other], top, other)
        if item < 0:
            continue
        move(bins, item, other)
        if back >= 0:
            move(bins, back, top)
        return True
    return False


@compiled
def _best_swap(bins: Bins, ours: IntArray, theirs: IntArray, top: int, other: int) -> tuple[int, int]:
    """Finds what to give and what to take back (or -1) so that the difference between two bins shrinks most."""
    tokens, costs = bins.tokens, bins.costs
    gap, free = bins.load[top] - bins.load[other], bins.budget - bins.fill[other]
    best_gain = 1e-7 * gap
    best_item, best_back = -1, -1
    after = 0
    count = len(theirs)
    for item in ours:
        ideal = costs[item] - 0.5 * gap
        while after < count and costs[theirs[after]] > ideal:
            after += 1
        # Nearest to the ideal are the last above and the first below it; the end of the list stands for nothing.
        for candidate in range(max(after - 1, 0), min(after, count) + 1):
            back = theirs[candidate] if candidate < count else -1
            moved = costs[item] - (costs[back] if back >= 0 else 0.0)
            shift = tokens[item] - (tokens[back] if back >= 0 else 0)
            gain = min(moved, gap - moved)
            if gain > best_gain and shift <= free and shift >= 0:
                best_gain, best_item, best_back = gain, item, back
    return best_item, best_back


@compiled
def _partition_with_cheap(bins: Bins, members: IntArray, own: IntArray) -> bool:
    """Partition the samples of the costliest bin and of one of the cheapest anew; False where that does not help."""
    top = own[len(own) - 1]
    ours = members[bins.bin_of[members] == top]
    if len(ours) < 2:
        return False
    for other in own[: min(3, len(own) - 1)]:
        fill = np.array([bins.fill[top], bins.fill[other]])
        theirs = members[bins.bin_of[members] == other]
        gap = bins.load[top] - bins.load[other]
        changed = two_way_partition(ours, theirs, bins.tokens, bins.costs, fill, bins.budget, gap)
        for item in changed:
            move(bins, item, other if bins.bin_of[item] == top else top)
        if len(changed):
            return True
    return False


@compiled
def two_way_partition(
    ours: IntArray, theirs: IntArray, tokens: IntArray, costs: FloatArray, fill: IntArray, budget: int, gap: float
) -> IntArray:
    """Finds samples of two bins that should change sides so that the bins cost the same; tries all subsets.

    Args:
        ours: samples of the costlier bin, the longest first.
        theirs: samples of the other bin, the longest first.
        tokens: ``[samples]`` tokens of all samples.
        costs: ``[samples]`` costs of all samples.
        fill: ``[2]`` tokens of either bin.
        budget: the most tokens of a bin.
        gap: by how much the first bin costs more.

    Returns:
        The samples that change sides; none where nothing is gained.
    """
    kept = min(len(ours) + len(theirs), _MOST_PARTITIONED)
    items = np.empty(kept, dtype=np.int64)
    is_ours = np.empty(kept, dtype=np.bool_)
    first, second = len(ours) - 1, len(theirs) - 1
    for number in range(kept):
        take = second < 0 or (first >= 0 and ours[first] > theirs[second])
        is_ours[number] = take
        if take:
            items[number] = ours[first]
            first -= 1
        else:
            items[number] = theirs[second]
            second -= 1
    moves = np.zeros(kept, dtype=np.bool_)
    best = np.zeros(kept, dtype=np.bool_)
    moved, shifted = 0.0, 0
    least = 0.5 * gap * (1.0 - 1e-6)
    for trial in range(1, 1 << kept):
        # A Gray code: from one trial to the next a single sample changes sides.
        number = 0
        while not (trial >> number) & 1:
            number += 1
        sign = 1 if is_ours[number] != moves[number] else -1
        moves[number] = not moves[number]
        moved += sign * costs[items[number]]
        shifted += sign * tokens[items[number]]
        off = abs(0.5 * gap - moved)
        if off < least and fill[1] + shifted <= budget and fill[0] - shifted <= budget:
            least = off
            best[:] = moves
    return items[best]
