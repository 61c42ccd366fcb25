"""Samples to bins of a token budget: best fit, longest processing time, and branch and bound for a few samples.

A bin is a microbatch to be filled. Samples come longest first, so that ties are broken by their order alone.
"""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray

MOST_SEARCHED = 12
"""Samples up to which branch and bound is worth its time."""

_MOST_NODES = 60_000
"""Nodes of the search tree that are visited before the best answer so far is taken: some milliseconds, compiled."""
_MOST_PASSED_OVER = 32
"""Full bins passed over in search of a cheap one with space; where there are more, there is hardly any space left."""


@compiled
def best_fit(tokens: IntArray, budget: int, most: int) -> tuple[IntArray, int]:
    """Best fit decreasing: each sample into the fullest bin that still has space for it.

    A binary tree over the amounts of free space, 0 to ``budget``, counts the bins that have each; so a sample finds its
    bin in logarithmic time.

    Args:
        tokens: ``[samples]`` falling, none above ``budget``.
        budget: the most tokens of a bin.
        most: bins that may be opened.

    Returns:
        ``[samples]`` bin or -1, and the number of bins opened.
    """
    count = len(tokens)
    bin_of = np.full(count, -1, dtype=np.int64)
    leaves = 1
    while leaves < budget + 1:
        leaves *= 2
    bins_below = np.zeros(2 * leaves, dtype=np.int64)
    top = np.full(budget + 1, -1, dtype=np.int64)  # for every amount of free space, a stack of bins
    next_below = np.full(min(most, count) + 1, -1, dtype=np.int64)
    opened = 0
    for item in range(count):
        free = _least_free(bins_below, leaves, tokens[item])
        if free > budget:
            if opened == most:
                continue
            chosen, free = opened, budget
            opened += 1
        else:
            chosen = top[free]
            top[free] = next_below[chosen]
            _count(bins_below, leaves + free, -1)
        bin_of[item] = chosen
        free -= tokens[item]
        next_below[chosen] = top[free]
        top[free] = chosen
        _count(bins_below, leaves + free, 1)
    return bin_of, opened


@compiled
def _count(bins_below: IntArray, node: int, change: int) -> None:
    while node > 0:
        bins_below[node] += change
        node //= 2


@compiled
def _least_free(bins_below: IntArray, leaves: int, wanted: int) -> int:
    """The least free space of an open bin that is not below ``wanted``; at least ``leaves`` where there is none."""
    node = leaves + wanted
    while bins_below[node] == 0:
        while node > 1 and node % 2 == 1:
            node //= 2
        if node <= 1:
            return leaves
        node += 1
    while node < leaves:
        node *= 2
        if bins_below[node] == 0:
            node += 1
    return node - leaves


@compiled
def fitting_count(tokens: IntArray, bins: int, budget: int) -> int:
    """Counts the first samples that best fit brings into ``bins`` bins, by bisection; ``tokens``: ``[samples]``."""
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
def longest_processing_time(tokens: IntArray, costs: FloatArray, bins: int, budget: int) -> IntArray:
    """Each sample, the costliest first, to the cheapest of ``bins`` bins that has space for it.

    Args:
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` falling.
        bins: number of bins.
        budget: the most tokens of a bin.

    Returns:
        ``[samples]`` bin; all from the first sample on that fits into no bin get -1.
    """
    count = len(tokens)
    bin_of = np.full(count, -1, dtype=np.int64)
    fill = np.zeros(bins, dtype=np.int64)
    load = np.zeros(bins, dtype=np.float64)
    heap = np.arange(bins)  # of bins by load; equal loads by number
    passed_over = np.empty(bins, dtype=np.int64)
    for item in range(count):
        size, passed = bins, 0
        while size > 0 and passed < _MOST_PASSED_OVER and fill[heap[0]] + tokens[item] > budget:
            passed_over[passed] = heap[0]
            passed += 1
            size -= 1
            heap[0] = heap[size]
            _sink(heap, load, size)
        chosen = heap[0]
        if size == 0 or fill[chosen] + tokens[item] > budget:
            return bin_of
        bin_of[item] = chosen
        fill[chosen] += tokens[item]
        load[chosen] += costs[item]
        _sink(heap, load, size)
        for number in range(passed):
            heap[size] = passed_over[number]
            size += 1
            _rise(heap, load, size - 1)
    return bin_of


@compiled
def _sink(heap: IntArray, load: FloatArray, size: int) -> None:
    node = 0
    while True:
        least = node
        for child in range(2 * node + 1, min(2 * node + 3, size)):
            if _is_before(heap[child], heap[least], load):
                least = child
        if least == node:
            return
        heap[node], heap[least] = heap[least], heap[node]
        node = least


@compiled
def _rise(heap: IntArray, load: FloatArray, node: int) -> None:
    while node > 0 and _is_before(heap[node], heap[(node - 1) // 2], load):
        above = (node - 1) // 2
        heap[node], heap[above] = heap[above], heap[node]
        node = above


@compiled
def _is_before(one: int, other: int, load: FloatArray) -> bool:
    return load[one] < load[other] or (load[one] == load[other] and one < other)


@compiled
def branch_and_bound(
    bin_of: IntArray, tokens: IntArray, costs: FloatArray, positions: int, ranks: int, budget: int, per_position: bool
) -> None:
    """Improve a complete answer in place by depth-first search with bounds.

    Args:
        bin_of: ``[samples]`` the microbatch of each, ``position * ranks + rank``.
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` falling.
        positions: microbatches of each rank.
        ranks: number of ranks.
        budget: the most tokens of a microbatch.
        per_position: what to minimise: True the sum over positions of the costliest microbatch, False the total of the
            costliest rank.
    """
    count, bins = len(tokens), positions * ranks
    fill = np.zeros(bins, dtype=np.int64)
    load = np.zeros(bins if per_position else ranks, dtype=np.float64)
    for item in range(count):
        load[bin_of[item] if per_position else bin_of[item] % ranks] += costs[item]
    best = _step_cost(load, ranks, per_position)
    total = 0.0
    for item in range(count):
        total += costs[item]
    bound = total / ranks
    load[:] = 0.0
    chosen = np.full(count, -1, dtype=np.int64)
    item = 0
    for _ in range(_MOST_NODES):
        if best <= bound * (1.0 + 1e-9):
            return
        # Take the sample out of its bin, if it has one, and try the next bin.
        number = chosen[item]
        if number >= 0:
            fill[number] -= tokens[item]
            load[number if per_position else number % ranks] -= costs[item]
        number += 1
        while number < bins and (
            fill[number] + tokens[item] > budget or _is_twin(fill, load, number, ranks, per_position)
        ):
            number += 1
        if number >= bins:
            chosen[item] = -1
            item -= 1
            if item < 0:
                return
            continue
        chosen[item] = number
        fill[number] += tokens[item]
        load[number if per_position else number % ranks] += costs[item]
        value = _step_cost(load, ranks, per_position)
        if value >= best * (1.0 - 1e-12):
            continue
        if item + 1 == count:
            best = value
            bin_of[:] = chosen
        else:
            item += 1
            chosen[item] = -1


@compiled
def _step_cost(load: FloatArray, ranks: int, per_position: bool) -> float:
    if not per_position:
        return float(load.max())
    value = 0.0
    for first in range(0, len(load), ranks):
        value += load[first : first + ranks].max()
    return value


@compiled
def _is_twin(fill: IntArray, load: FloatArray, number: int, ranks: int, per_position: bool) -> bool:
    """This bin and the one before it at its position are both empty: the search need not try both."""
    if number % ranks == 0 or fill[number] or fill[number - 1]:
        return False
    return per_position or (load[number % ranks] == 0.0 and load[number % ranks - 1] == 0.0)
