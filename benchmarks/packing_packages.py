"""Packers from installed packages; each function asks for its own when it is called."""

from __future__ import annotations

import numpy as np

from benchmarks.packing_papers import cheapest
from benchmarks.packing_signatures import Bins, Floats, Ints, StepPacker, WindowPacker


def trl(strategy: str) -> WindowPacker:
    """TRL's packing of a dataset, by the name of its strategy."""
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
    """binpacking: bins of a size."""
    import binpacking

    return [list(members) for members in binpacking.to_constant_volume(dict(enumerate(tokens.tolist())), budget)]


def prtpy_fit() -> WindowPacker:
    """prtpy: first fit, longest first."""
    import prtpy

    def pack(tokens: Ints, budget: int) -> Bins:
        items = dict(enumerate(tokens.tolist()))
        return [list(m) for m in prtpy.pack(algorithm=prtpy.packing.first_fit_decreasing, binsize=budget, items=items)]

    return pack


def prtpy_partition(name: str) -> StepPacker:
    """prtpy: a number of bins of like cost, by the name of the algorithm."""
    import prtpy

    algorithm = getattr(prtpy.partitioning, name)

    def pack(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
        return [list(m) for m in prtpy.partition(algorithm=algorithm, numbins=bins, items=dict(enumerate(costs)))]

    return pack


def numberpartitioning_kk(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
    """numberpartitioning: Karmarkar-Karp over costs."""
    from numberpartitioning import karmarkar_karp

    found = karmarkar_karp(costs.tolist(), num_parts=bins, return_indices=True)
    return [list(members) for members in found.partition]


def binpacking_number(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
    """binpacking: a number of bins of like cost."""
    import binpacking

    return [list(m) for m in binpacking.to_constant_bin_number(dict(enumerate(costs.tolist())), bins)]


def cp_sat(seconds: float) -> StepPacker:
    """OR-tools' constraint solver for so many seconds, from the greedy answer on."""
    from ortools.sat.python import cp_model

    def pack(tokens: Ints, costs: Floats, bins: int, budget: int) -> Bins:
        model = cp_model.CpModel()
        whole = np.rint(costs).astype(int).tolist()
        is_in = [[model.new_bool_var("") for _ in range(bins)] for _ in whole]
        longest = model.new_int_var(0, sum(whole), "")
        for of_item in is_in:
            model.add_exactly_one(of_item)
        for number in range(bins):
            model.add(sum(one[number] * c for one, c in zip(is_in, whole, strict=True)) <= longest)
            model.add(sum(one[number] * t for one, t in zip(is_in, tokens.tolist(), strict=True)) <= budget)
        hint = cheapest(tokens, costs, bins, budget)
        for number, members in enumerate(hint):
            for item in members:
                model.add_hint(is_in[item][number], 1)
        model.minimize(longest)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 1
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return hint
        return [[i for i, one in enumerate(is_in) if solver.value(one[number])] for number in range(bins)]

    return pack


def milp(seconds: float) -> StepPacker:
    """SciPy's mixed-integer solver for so many seconds; the greedy answer where it finds none."""
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
