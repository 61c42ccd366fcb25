"""Exhaustive search over tiny steps, where a rule of thumb can be far from the best."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.plan import FloatArray, IntArray

MOST_SAMPLES = 12
"""Steps with more samples are not searched."""
_MOST_TRIALS = 60_000
"""Placements tried before the best so far is taken: some milliseconds, compiled."""


@compiled
def search(
    bin_of: IntArray, tokens: IntArray, costs: FloatArray, rows: int, width: int, budget: int, by_row: bool
) -> None:
    """Improve ``bin_of`` in place by depth-first search with bounds.

    Args:
        bin_of: ``[samples]`` a complete answer, ``row * width + column``.
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` falling likewise.
        rows: number of rows.
        width: bins of a row.
        budget: the most tokens of a bin.
        by_row: what is to be least: True the sum over rows of the costliest bin, False the costliest column.
    """
    count, bins = len(tokens), rows * width
    groups = rows if by_row else width
    fill = np.zeros(bins, dtype=np.int64)
    load = np.zeros(bins if by_row else width, dtype=np.float64)
    for item in range(count):
        load[bin_of[item] if by_row else bin_of[item] % width] += costs[item]
    best = _value(load, groups, by_row)
    total = 0.0
    for item in range(count):
        total += costs[item]
    bound = total / width
    load[:] = 0.0
    chosen = np.full(count, -1, dtype=np.int64)
    values = np.zeros(count + 1, dtype=np.float64)
    item = 0
    for _ in range(_MOST_TRIALS):
        if best <= bound * (1.0 + 1e-9):
            return
        # Take the sample out of its place, if it has one, and try the next.
        place = chosen[item]
        if place >= 0:
            fill[place] -= tokens[item]
            load[place if by_row else place % width] -= costs[item]
        place += 1
        while place < bins and (fill[place] + tokens[item] > budget or _is_twin(fill, load, place, width, by_row)):
            place += 1
        if place >= bins:
            chosen[item] = -1
            item -= 1
            if item < 0:
                return
            continue
        chosen[item] = place
        fill[place] += tokens[item]
        load[place if by_row else place % width] += costs[item]
        values[item + 1] = _value(load, groups, by_row)
        if values[item + 1] >= best * (1.0 - 1e-12):
            continue
        if item + 1 == count:
            best = values[item + 1]
            bin_of[:] = chosen
        else:
            item += 1
            chosen[item] = -1


@compiled
def _value(load: FloatArray, groups: int, by_row: bool) -> float:
    if not by_row:
        return float(load.max())
    width = len(load) // groups
    value = 0.0
    for row in range(groups):
        value += load[row * width : (row + 1) * width].max()
    return value


@compiled
def _is_twin(fill: IntArray, load: FloatArray, place: int, width: int, by_row: bool) -> bool:
    """The bin is empty, and so is the one before it in its row: both lead to the same."""
    if place % width == 0 or fill[place] or fill[place - 1]:
        return False
    return by_row or (load[place % width] == 0.0 and load[place % width - 1] == 0.0)
