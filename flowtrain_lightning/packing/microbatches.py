"""Samples to microbatches: as few as the token budget allows, equal in number on all ranks, alike in cost."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np

from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.plan import IntArray

Bins = list[list[int]]


def pack_microbatches(
    tokens: IntArray, *, ranks: int, token_budget: int, cost: CostModel
) -> tuple[tuple[IntArray, ...], ...]:
    """Pack samples into microbatches and deal these to the backbone ranks.

    Microbatches at one position are alike in cost on all ranks, and so are the ranks' totals. Ties are broken by
    index, so the answer depends on the arguments alone.

    Args:
        tokens: ``[samples]`` tokens of each sample, none above ``token_budget``.
        ranks: backbone ranks.
        token_budget: the most tokens of one microbatch.
        cost: what a packed set of sequences costs the backbone.

    Returns:
        ``[rank][position]`` -> sample numbers, ascending; empty arrays where there are fewer samples than
        microbatches. Without samples every rank has one empty microbatch.
    """
    costs = cost.of_each(tokens).tolist()
    bins = best_fit(tokens.tolist(), token_budget)
    count = max(1, -(-len(bins) // ranks)) * ranks
    bins += [[] for _ in range(count - len(bins))]
    bins = balance(tokens.tolist(), costs, count, token_budget) or bins
    microbatches = [np.array(sorted(members), dtype=np.int64) for members in bins]
    return _deal(microbatches, [cost.of_set(tokens[members]) for members in microbatches], ranks)


def best_fit(tokens: list[int], token_budget: int) -> Bins:
    """Best-fit decreasing: each sample, the longest first, into the fullest bin that still has room for it."""
    bins: Bins = []
    rooms: list[tuple[int, int]] = []  # (room, bin), sorted
    for sample in sorted(range(len(tokens)), key=lambda sample: (-tokens[sample], sample)):
        place = bisect_left(rooms, (tokens[sample], -1))
        if place == len(rooms):
            room, chosen = token_budget, len(bins)
            bins.append([])
        else:
            room, chosen = rooms.pop(place)
        bins[chosen].append(sample)
        insort(rooms, (room - tokens[sample], chosen))
    return bins


def balance(tokens: list[int], costs: list[float], count: int, token_budget: int) -> Bins | None:
    """Each sample, the costliest first, into the cheapest of ``count`` bins that has room for it.

    Returns:
        The bins, or None where some sample found no room: going by cost can waste room that best fit keeps.
    """
    bins: Bins = [[] for _ in range(count)]
    rooms = [token_budget] * count
    cheapest = [(0.0, number) for number in range(count)]  # a heap
    for sample in sorted(range(len(tokens)), key=lambda sample: (-costs[sample], sample)):
        too_full = []
        while cheapest and rooms[cheapest[0][1]] < tokens[sample]:
            too_full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        total, chosen = cheapest[0]
        bins[chosen].append(sample)
        rooms[chosen] -= tokens[sample]
        heapq.heapreplace(cheapest, (total + costs[sample], chosen))
        for entry in too_full:
            heapq.heappush(cheapest, entry)
    return bins


def _deal(microbatches: list[IntArray], costs: list[float], ranks: int) -> tuple[tuple[IntArray, ...], ...]:
    """Deal to ranks like a snake: the costliest ``ranks`` ones from left to right, the next from right to left."""
    order = sorted(range(len(microbatches)), key=lambda number: (-costs[number], number))
    hands: list[list[IntArray]] = [[] for _ in range(ranks)]
    for position, start in enumerate(range(0, len(order), ranks)):
        row = order[start : start + ranks]
        for hand, number in zip(hands, row if position % 2 == 0 else row[::-1], strict=True):
            hand.append(microbatches[number])
    return tuple(tuple(hand) for hand in hands)
