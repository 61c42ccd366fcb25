"""Two rules that look at one sample after another: the bin that it fills best, and the cheapest bin."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.plan import FloatArray, IntArray

_MOST_ASIDE = 32
"""Full bins passed over in search of a cheap one with room; where there are more, there is hardly room left."""


@compiled
def best_fit(tokens: IntArray, budget: int, most: int) -> tuple[IntArray, int]:
    """Each sample, the longest first, into the fullest bin that still has room for it.

    A tree over the rooms 0 … ``budget`` knows which of them some bin has, so that a sample finds its bin in
    logarithmic time.

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
    newest = np.full(budget + 1, -1, dtype=np.int64)  # a stack of bins for every room
    beneath = np.full(min(most, count) + 1, -1, dtype=np.int64)
    opened = 0
    for item in range(count):
        room = _least_room(bins_below, leaves, tokens[item])
        if room > budget:
            if opened == most:
                continue
            chosen, room = opened, budget
            opened += 1
        else:
            chosen = newest[room]
            newest[room] = beneath[chosen]
            _count(bins_below, leaves + room, -1)
        bin_of[item] = chosen
        room -= tokens[item]
        beneath[chosen] = newest[room]
        newest[room] = chosen
        _count(bins_below, leaves + room, 1)
    return bin_of, opened


@compiled
def _count(bins_below: IntArray, node: int, change: int) -> None:
    while node > 0:
        bins_below[node] += change
        node //= 2


@compiled
def _least_room(bins_below: IntArray, leaves: int, wanted: int) -> int:
    """The least room of an open bin that is not below ``wanted``; at least ``leaves`` where there is none."""
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
def cheapest_first(tokens: IntArray, costs: FloatArray, bins: int, budget: int) -> IntArray:
    """Each sample, the costliest first, to the cheapest of ``bins`` that has room for it.

    Args:
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` falling likewise.
        bins: number of bins.
        budget: the most tokens of a bin.

    Returns:
        ``[samples]`` bin; all from the first sample on that finds no room get -1.
    """
    count = len(tokens)
    bin_of = np.full(count, -1, dtype=np.int64)
    fill = np.zeros(bins, dtype=np.int64)
    load = np.zeros(bins, dtype=np.float64)
    heap = np.arange(bins)  # of bins by load and number; the order of equal loads is by number
    aside = np.empty(bins, dtype=np.int64)
    for item in range(count):
        size, put_aside = bins, 0
        while size > 0 and put_aside < _MOST_ASIDE and fill[heap[0]] + tokens[item] > budget:
            aside[put_aside] = heap[0]
            put_aside += 1
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
        for number in range(put_aside):
            heap[size] = aside[number]
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
