"""How much idle time no arrangement can avoid, given the samples, the token budget and how long samples may wait."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.plan import FloatArray, IntArray

_LEVELS = 200


def idle_bound(tokens: IntArray, step: FloatArray, cost: CostModel, *, width: int, budget: int, reach: int) -> float:
    """A lower bound on the idle share of ranks that meet at every microbatch.

    A row in which one bin costs ``x`` idles wherever its other bins cannot cost ``x``. What a bin may cost follows
    from its longest sample: filled with as many like it as fit, and one that fills the rest. So above every level
    ``x`` the bound counts rows that must exist (samples dearer than ``x`` that are too far apart in time to share
    one) and the bins of these rows for which no sample near in time is long enough.

    Args:
        tokens: ``[samples]`` in the order in which they are drawn.
        step: ``[samples]`` the step whose share of the stream each sample is in; never falling.
        cost: what a packed set of sequences costs.
        width: bins of a row, that is ranks.
        budget: the most tokens of a bin.
        reach: steps by which two samples of one row may be apart in the stream (longest wait and look-ahead).

    Returns:
        idle time / (idle time + computing time), from 0 to 1.
    """
    costs = cost.of_each(tokens)
    exact = tokens.astype(np.float64)
    alike = np.floor(budget / exact)
    most = cost.linear * budget + cost.quadratic * (alike * exact**2 + (budget - alike * exact) ** 2)
    # Below what the shortest samples alone can make of a bin, no bin falls short.
    lowest = float(most.min())
    above = costs > lowest
    if not above.any():
        return 0.0
    levels = np.unique(np.append(np.quantile(costs[above], np.linspace(0, 1, _LEVELS)), lowest))
    idle = 0.0
    for lower, upper in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        dear, long = step[costs >= upper], step[most > lower]
        rows = _apart(dear, reach)
        near = len(rows) * width - _matched(rows, long, width, reach)
        anywhere = _fewest_rows(dear, reach, width) * width - len(long)
        idle += max(near, anywhere) * (upper - lower)
    return idle / (idle + float(costs.sum()))


def rank_bound(costs: list[FloatArray], ranks: int) -> float:
    """The same where ranks meet once a step: ``costs`` are those of each step's samples."""
    total = sum(float(of_step.sum()) for of_step in costs)
    time = sum(max(float(of_step.sum()) / ranks, float(of_step.max(initial=0.0))) for of_step in costs)
    return 1 - total / ranks / time if time else 0.0


def _apart(steps: FloatArray, reach: int) -> list[float]:
    """As many of ``steps`` as can be chosen with more than ``reach`` between any two."""
    chosen: list[float] = []
    for step in steps.tolist():
        if not chosen or step - chosen[-1] > reach:
            chosen.append(step)
    return chosen


def _fewest_rows(steps: FloatArray, reach: int, width: int) -> int:
    """Rows without which samples at ``steps`` cannot each have a bin of their own."""
    rows, members, first = 0, width, 0.0
    for step in steps.tolist():
        if members == width or step - first > reach:
            rows, members, first = rows + 1, 0, step
        members += 1
    return rows


def _matched(rows: list[float], steps: FloatArray, width: int, reach: int) -> int:
    """Samples at ``steps`` that find a bin of their own, each in a row no further than ``reach`` away."""
    room = [width] * len(rows)
    found = first = 0
    for step in steps.tolist():
        while first < len(rows) and (room[first] == 0 or rows[first] + reach < step):
            first += 1
        row = first
        while row < len(rows) and rows[row] - reach <= step:
            if room[row] > 0:
                room[row] -= 1
                found += 1
                break
            row += 1
    return found
