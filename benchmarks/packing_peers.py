"""Other packers, from PyPI and from papers, behind two signatures: bins of a window, and the bins of one step."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bins = list[list[int]]
WindowPacker = Callable[[Ints, int], Bins]
"""Tokens and budget to any number of bins."""
StepPacker = Callable[[Ints, Floats, int, int], Bins]
"""Tokens, costs, number of bins and budget to just so many bins."""


# ---- from PyPI: the user installs them; a peer that is not there is left out -----------------------------------------


def trl(strategy: str) -> WindowPacker:
    import pyarrow
    from datasets import Dataset, disable_progress_bars
    from trl.data_utils import pack_dataset

    disable_progress_bars()

    def pack(tokens: Ints, budget: int) -> Bins:
        table = pyarrow.table({"input_ids": [np.full(count, i, np.int32) for i, count in enumerate(tokens.tolist())]})
        packed = pack_dataset(Dataset(table), budget, strategy, map_kwargs={"batch_size": len(tokens)})
        return [sorted(set(ids)) for ids in packed["input_ids"]]

    return pack


def binpacking_volume(tokens: Ints, budget: int) -> Bins:
    import binpacking

    return [list(members) for members in binpacking.to_constant_volume(dict(enumerate(tokens.tolist())), budget)]


def prtpy_fit() -> WindowPacker:
    import prtpy

    def pack(tokens: Ints, budget: int) -> Bins:
        items = dict(enumerate(tokens.tolist()))
        return [list(m) for m in prtpy.pack(algorithm=prtpy.packing.first_fit_decreasing, binsize=budget, items=items)]

    return pack


def prtpy_partition(name: str) -> StepPacker:
    import prtpy

    algorithm = getattr(prtpy.partitioning, name)

    def pack(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
        return [list(m) for m in prtpy.partition(algorithm=algorithm, numbins=bins, items=dict(enumerate(costs)))]

    return pack


def numberpartitioning_kk(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
    from numberpartitioning import karmarkar_karp

    found = karmarkar_karp(costs.tolist(), num_parts=bins, return_indices=True)
    return [list(members) for members in found.partition]


def binpacking_number(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
    import binpacking

    return [list(m) for m in binpacking.to_constant_bin_number(dict(enumerate(costs.tolist())), bins)]


def cp_sat(seconds: float) -> StepPacker:
    from ortools.sat.python import cp_model

    def pack(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
        model = cp_model.CpModel()
        whole = np.rint(costs).astype(int).tolist()
        place = [[model.new_bool_var("") for _ in range(bins)] for _ in whole]
        longest = model.new_int_var(0, sum(whole), "")
        for row in place:
            model.add_exactly_one(row)
        for number in range(bins):
            model.add(sum(row[number] * c for row, c in zip(place, whole, strict=True)) <= longest)
            model.add(sum(row[number] * t for row, t in zip(place, tokens.tolist(), strict=True)) <= budget)
        hint = cheapest(tokens, costs, bins, budget)
        for number, members in enumerate(hint):
            for item in members:
                model.add_hint(place[item][number], 1)
        model.minimize(longest)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 1
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return hint
        return [[i for i, row in enumerate(place) if solver.value(row[number])] for number in range(bins)]

    return pack


def milp(seconds: float) -> StepPacker:
    from scipy import optimize, sparse

    def pack(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
        count = len(tokens)
        ones = sparse.kron(sparse.eye(count), np.ones((1, bins)))
        by_bin = [sparse.kron(values.reshape(1, -1), sparse.eye(bins)) for values in (costs, tokens.astype(float))]
        column = sparse.csr_matrix((count, 1))
        answer = optimize.milp(
            np.append(np.zeros(count * bins), 1.0),
            integrality=np.append(np.ones(count * bins), 0),
            bounds=optimize.Bounds(0, np.append(np.ones(count * bins), np.inf)),
            constraints=[
                optimize.LinearConstraint(sparse.hstack([ones, column]), 1, 1),
                optimize.LinearConstraint(sparse.hstack([by_bin[0], -np.ones((bins, 1))]), -np.inf, 0),
                optimize.LinearConstraint(sparse.hstack([by_bin[1], np.zeros((bins, 1))]), -np.inf, budget),
            ],
            options={"time_limit": seconds},
        )
        if answer.x is None:
            return cheapest(tokens, costs, bins, budget)
        chosen = answer.x[:-1].reshape(count, bins).argmax(axis=1)
        return [np.flatnonzero(chosen == number).tolist() for number in range(bins)]

    return pack


# ---- from papers -----------------------------------------------------------------------------------------------------


def cheapest(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
    """OrchMLLM, DFLOP without a solver: costliest first to the cheapest bin with room."""
    return _greedy(tokens, costs, bins, budget)


def fewest_tokens(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
    """DistTrain: longest first to the bin with the fewest tokens."""
    return _greedy(tokens, tokens.astype(float), bins, budget)


def _greedy(tokens: Ints, weights: Floats, bins: int, budget: int) -> Bins:
    members: Bins = [[] for _ in range(bins)]
    room = [budget] * bins
    heap = [(0.0, number) for number in range(bins)]
    for item in np.argsort(-weights, kind="stable").tolist():
        aside = []
        while heap and room[heap[0][1]] < tokens[item]:
            aside.append(heapq.heappop(heap))
        if heap:
            load, number = heapq.heappop(heap)
            heapq.heappush(heap, (load + weights[item], number))
            members[number].append(item)
            room[number] -= int(tokens[item])
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


def verl(tokens: Ints, costs: Floats, bins: int, budget: int, ranks: int = 8) -> Bins:
    """Karmarkar-Karp over ranks, then into each rank's microbatches: a row holds one of every rank."""
    found: Bins = [[] for _ in range(bins)]
    for rank, own in enumerate(karmarkar_karp(costs, ranks)):
        parts = karmarkar_karp(costs[own], bins // ranks)
        parts.sort(key=lambda members: -costs[own][members].sum())
        for position, members in enumerate(parts):
            found[position * ranks + rank] = [own[item] for item in members]
    return found


def flowtrain_paper(tokens: Ints, budget: int) -> Bins:
    """FlowTrain: best fit in order of arrival, then buckets of equal cost, dealt like a snake."""
    room: list[int] = []
    members: Bins = []
    for item, length in enumerate(tokens.tolist()):
        fits = [number for number, free in enumerate(room[-64:], max(0, len(room) - 64)) if free >= length]
        if fits:
            best = min(fits, key=lambda number: room[number])
        else:
            best = len(room)
            room.append(budget)
            members.append([])
        room[best] -= length
        members[best].append(item)
    cost = [tokens[m].sum() / budget + (tokens[m].max() / budget) ** 2 for m in members]
    return [members[number] for number in np.argsort(-np.array(cost), kind="stable")]


class WlbQueue:
    """WLB-LLM: longest first to the lightest bin, else the shortest; outliers queue until there is one per rank.

    Outliers are what costs more than ``outlier`` of a mean bin. They queue by size, in ``levels`` of equal ratio, so
    that a row is made of outliers that cost alike; the paper tunes both, and so does the benchmark.
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
            members, load, left = self._place(
                sorted(drawn, key=lambda entry: -tokens[entry[0]]), tokens, costs, bins, budget
            )
            carried = left
            kept = {item for item, _ in left}
            longest = max([longest, *(number - born for item, born in drawn if item not in kept)])
            steps.append([members[i] for i in np.argsort(-load, kind="stable")])

    @staticmethod
    def _place(
        drawn: list[tuple[int, int]], tokens: Ints, costs: Floats, bins: int, budget: int
    ) -> tuple[Bins, Floats, list[tuple[int, int]]]:
        load, room = np.zeros(bins), np.full(bins, budget)
        members: Bins = [[] for _ in range(bins)]
        left = []
        for item, born in drawn:
            best = int(load.argmin())
            if room[best] < tokens[item]:
                best = int(room.argmax())
            if room[best] < tokens[item]:
                left.append((item, born))
                continue
            members[best].append(item)
            load[best] += costs[item]
            room[best] -= tokens[item]
        return members, load, left


def window_packers() -> dict[str, WindowPacker]:
    """Peers that fill bins to a token budget."""
    found: dict[str, WindowPacker] = {"FlowTrain best fit*": flowtrain_paper}
    # TRL's other strategies cut samples in pieces, so that one is in several bins.
    found |= _available({"trl bfd": ("trl", lambda: trl("bfd"))})
    found |= _available({"binpacking volume": ("binpacking", lambda: binpacking_volume)})
    found |= _available({"prtpy FFD": ("prtpy", prtpy_fit)})
    return found


def step_packers(solver_seconds: float) -> dict[str, tuple[StepPacker, float, int | None]]:
    """Peers that balance a number of bins: the packer, its share of the budget, and the most steps to try."""
    found: dict[str, tuple[StepPacker, float, int | None]] = {
        "OrchMLLM, DFLOP LPT*": (cheapest, 0.97, None),
        "DistTrain LPT*": (fewest_tokens, 0.97, None),
        "verl KK+KK*": (verl, 0.90, 40),
        "scipy milp": (milp(solver_seconds), 0.97, 2),
    }
    named: dict[str, tuple[str, Callable[[], Any]]] = {
        "prtpy KK": ("prtpy", lambda: (prtpy_partition("kk"), 0.90, 10)),
        "prtpy LPT": ("prtpy", lambda: (prtpy_partition("greedy"), 0.90, 10)),
        "numberpartitioning KK": ("numberpartitioning", lambda: (numberpartitioning_kk, 0.90, 10)),
        "binpacking number": ("binpacking", lambda: (binpacking_number, 0.90, 40)),
        "ortools CP-SAT": ("ortools", lambda: (cp_sat(solver_seconds), 0.97, 2)),
    }
    return found | _available(named)


def _available(named: dict[str, tuple[str, Callable[[], Any]]]) -> dict[str, Any]:
    found = {}
    for name, (package, make) in named.items():
        if find_spec(package) is None:
            print(f"{name} is left out: install {package} to compare with it.")
            continue
        try:
            found[name] = make()
        except Exception as error:
            print(f"{name} is left out: {error}")
    return found
