"""Packers from papers, written down again."""

from __future__ import annotations

import heapq

import numpy as np

from benchmarks.packing_signatures import Bins, Floats, Ints


def cheapest(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
    """OrchMLLM, DFLOP without a solver: costliest first to the cheapest bin with space."""
    return _greedy(tokens, costs, bins, budget)


def fewest_tokens(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
    """DistTrain: longest first to the bin with the fewest tokens."""
    return _greedy(tokens, tokens.astype(float), bins, budget)


def _greedy(tokens: Ints, weights: Floats, bins: int, budget: int) -> Bins:
    members: Bins = [[] for _ in range(bins)]
    free_space = [budget] * bins
    heap = [(0.0, number) for number in range(bins)]
    for item in np.argsort(-weights, kind="stable").tolist():
        aside = []
        while heap and free_space[heap[0][1]] < tokens[item]:
            aside.append(heapq.heappop(heap))
        if heap:
            load, number = heapq.heappop(heap)
            heapq.heappush(heap, (load + weights[item], number))
            members[number].append(item)
            free_space[number] -= int(tokens[item])
        for entry in aside:
            heapq.heappush(heap, entry)
    return members


def karmarkar_karp(costs: Floats, parts: int) -> Bins:
    """The largest differencing method, as verl uses it."""
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, value in enumerate(costs.tolist()):
        sets = [(value, [number])] + [(0.0, []) for _ in range(parts - 1)]
        heapq.heappush(heap, (-value, number, sets))
    tie = len(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
        tie += 1
    return [members for _, members in heap[0][2]]


def verl(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
    """Karmarkar-Karp over ranks, then into each rank's microbatches: a position holds one of every rank."""
    ranks = 8
    found: Bins = [[] for _ in range(bins)]
    for rank, own in enumerate(karmarkar_karp(costs, ranks)):
        parts = karmarkar_karp(costs[own], bins // ranks)
        parts.sort(key=lambda members: -costs[own][members].sum())
        for position, members in enumerate(parts):
            found[position * ranks + rank] = [own[item] for item in members]
    return found


def flowtrain_paper(tokens: Ints, budget: int) -> Bins:
    """FlowTrain: best fit in order of arrival, then buckets of equal cost, dealt like a snake."""
    free_space: list[int] = []
    members: Bins = []
    for item, length in enumerate(tokens.tolist()):
        fits = [number for number, free in enumerate(free_space[-64:], max(0, len(free_space) - 64)) if free >= length]
        if fits:
            best = min(fits, key=lambda number: free_space[number])
        else:
            best = len(free_space)
            free_space.append(budget)
            members.append([])
        free_space[best] -= length
        members[best].append(item)
    cost = [tokens[m].sum() / budget + (tokens[m].max() / budget) ** 2 for m in members]
    return [members[number] for number in np.argsort(-np.array(cost), kind="stable")]


class WlbQueue:
    """WLB-LLM: longest first to the lightest bin, else the shortest; outliers queue until there is one per rank.

    Outliers are what costs more than ``outlier`` of a mean bin. They queue by size, in ``levels`` of equal ratio, so
    that a position is made of outliers that cost alike; the paper tunes both, and so does the benchmark.
    """

    def __init__(
        self, ranks: int, fill: float = 0.985, max_delay: int | None = None, outlier: float = 0.97, levels: int = 1
    ) -> None:
        self.ranks, self.fill, self.max_delay, self.outlier, self.levels = ranks, fill, max_delay, outlier, levels

    def pack(self, tokens: Ints, costs: Floats, bins: int, budget: int) -> tuple[list[Bins], int]:
        """All steps of a stream, and the longest wait in steps."""
        steps: list[Bins] = []
        queues: list[list[tuple[int, int]]] = [[] for _ in range(self.levels)]
        carried: list[tuple[int, int]] = []
        limit = self.outlier * self.fill * budget * costs.sum() / tokens.sum()
        level = np.floor(np.log(costs / limit) / np.log(costs.max() / limit * 1.000001) * self.levels)
        next_item, longest = 0, 0
        while True:
            number, drawn = len(steps), carried
            for queue in queues:
                if len(queue) >= self.ranks or (
                    self.max_delay is not None and queue and number - queue[0][1] >= self.max_delay
                ):
                    drawn = drawn + queue[: self.ranks]
                    del queue[: self.ranks]
            filled = sum(int(tokens[item]) for item, _ in drawn)
            while filled < self.fill * bins * budget and next_item < len(tokens):
                if costs[next_item] > limit:
                    queues[int(level[next_item])].append((next_item, number))
                else:
                    drawn.append((next_item, number))
                    filled += int(tokens[next_item])
                next_item += 1
            if next_item == len(tokens):
                return steps, longest
            members, load, left = self._put(
                sorted(drawn, key=lambda entry: -tokens[entry[0]]), tokens, costs, bins, budget
            )
            carried = left
            kept = {item for item, _ in left}
            longest = max([longest, *(number - born for item, born in drawn if item not in kept)])
            steps.append([members[i] for i in np.argsort(-load, kind="stable")])

    @staticmethod
    def _put(
        drawn: list[tuple[int, int]], tokens: Ints, costs: Floats, bins: int, budget: int
    ) -> tuple[Bins, Floats, list[tuple[int, int]]]:
        load, free_space = np.zeros(bins), np.full(bins, budget)
        members: Bins = [[] for _ in range(bins)]
        left = []
        for item, born in drawn:
            best = int(load.argmin())
            if free_space[best] < tokens[item]:
                best = int(free_space.argmax())
            if free_space[best] < tokens[item]:
                left.append((item, born))
                continue
            members[best].append(item)
            load[best] += costs[item]
            free_space[best] -= tokens[item]
        return members, load, left
