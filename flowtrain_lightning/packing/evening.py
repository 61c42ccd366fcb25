"""Evening out: samples move or change places between bins until the costliest is no longer above the others."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.plan import FloatArray, IntArray
from flowtrain_lightning.packing.splitting import split_evenly

ROUNDS = 64
"""Exchanges per group, at most."""
_FEW = 10
"""Samples per bin of a group above which exchanges alone even it out."""
SPLITS = 8
"""Times that all samples of two bins of a group are shared out anew, where no exchange helps."""


@compiled
def even_out(
    bin_of: IntArray,
    group_of: IntArray,
    groups: int,
    tokens: IntArray,
    costs: FloatArray,
    bins: int,
    budget: int,
    tolerance: float = 2e-5,
) -> None:
    """Even out the cost of bins inside each group; ``bin_of`` is changed in place.

    Args:
        bin_of: ``[samples]`` the bin of each sample, or -1.
        group_of: ``[bins]`` the group of each bin: its bins are to cost the same.
        groups: number of groups.
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` falling likewise.
        bins: number of bins.
        budget: the most tokens of a bin; no exchange exceeds it.
        tolerance: how far above its group's mean the costliest bin may stay, as a share of the mean.
    """
    count = len(tokens)
    fill = np.zeros(bins, dtype=np.int64)
    cost = np.zeros(bins, dtype=np.float64)
    start = np.zeros(groups + 1, dtype=np.int64)
    for item in range(count):
        if bin_of[item] >= 0:
            fill[bin_of[item]] += tokens[item]
            cost[bin_of[item]] += costs[item]
            start[group_of[bin_of[item]] + 1] += 1
    for group in range(groups):
        start[group + 1] += start[group]
    members = np.empty(start[groups], dtype=np.int64)
    place = start[:groups].copy()
    for item in range(count):
        if bin_of[item] >= 0:
            group = group_of[bin_of[item]]
            members[place[group]] = item
            place[group] += 1
    own = np.empty(bins, dtype=np.int64)
    for group in range(groups):
        size = 0
        for number in range(bins):
            if group_of[number] == group:
                own[size] = number
                size += 1
        _even_group(
            members[start[group] : start[group + 1]], own[:size], bin_of, tokens, costs, fill, cost, budget, tolerance
        )


@compiled
def _even_group(
    members: IntArray,
    bins: IntArray,
    bin_of: IntArray,
    tokens: IntArray,
    costs: FloatArray,
    fill: IntArray,
    cost: FloatArray,
    budget: int,
    tolerance: float,
) -> None:
    width = len(bins)
    splits = SPLITS if len(members) <= _FEW * width else 0
    for _ in range(ROUNDS):
        bins = bins[np.argsort(cost[bins], kind="mergesort")]
        top = bins[width - 1]
        total = 0.0
        for number in bins:
            total += cost[number]
        if cost[top] * width <= total * (1.0 + tolerance):
            return
        ours = members[bin_of[members] == top]
        for number in range(width - 1):
            other = bins[number]
            item, back = _best_exchange(
                ours, members[bin_of[members] == other], cost[top] - cost[other], tokens, costs, budget - fill[other]
            )
            if item < 0:
                continue
            _move(item, other, bin_of, tokens, costs, fill, cost)
            if back >= 0:
                _move(back, top, bin_of, tokens, costs, fill, cost)
            break
        else:
            if splits == 0:
                return
            splits -= 1
            if not _split_with_any(members, bins, bin_of, tokens, costs, fill, cost, budget):
                return


@compiled
def _split_with_any(
    members: IntArray,
    bins: IntArray,
    bin_of: IntArray,
    tokens: IntArray,
    costs: FloatArray,
    fill: IntArray,
    cost: FloatArray,
    budget: int,
) -> bool:
    """Share the samples of the costliest bin and of one of the cheapest out anew; False where that does not help."""
    top = bins[len(bins) - 1]
    ours = members[bin_of[members] == top]
    if len(ours) < 2:
        return False
    for other in bins[: min(3, len(bins) - 1)]:
        both = np.array([fill[top], fill[other]])
        theirs = members[bin_of[members] == other]
        changed = split_evenly(ours, theirs, tokens, costs, both, budget, cost[top] - cost[other])
        for item in changed:
            _move(item, other if bin_of[item] == top else top, bin_of, tokens, costs, fill, cost)
        if len(changed):
            return True
    return False


@compiled
def _move(
    item: int, target: int, bin_of: IntArray, tokens: IntArray, costs: FloatArray, fill: IntArray, cost: FloatArray
) -> None:
    """Move a sample from its bin to another one."""
    source = bin_of[item]
    bin_of[item] = target
    fill[source] -= tokens[item]
    fill[target] += tokens[item]
    cost[source] -= costs[item]
    cost[target] += costs[item]


@compiled
def _best_exchange(
    ours: IntArray, theirs: IntArray, gap: float, tokens: IntArray, costs: FloatArray, room: int
) -> tuple[int, int]:
    """What to give and what to take back (or -1) so that a difference of ``gap`` between two bins shrinks most."""
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
            if gain > best_gain and shift <= room and shift >= 0:
                best_gain, best_item, best_back = gain, item, back
    return best_item, best_back
