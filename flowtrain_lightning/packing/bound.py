"""How much idle time no arrangement can avoid, given the samples, the token budget and how long samples may wait."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.plan import FloatArray, IntArray

_SHARES = np.linspace(0, 1, 200)
"""Shares of the samples at whose costs the levels lie."""


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
    levels = np.concatenate([np.quantile(values[values > lowest], _SHARES) for values in (costs, most)])
    levels = np.unique(np.append(levels[levels <= costs.max()], lowest))
    when = (step - step[0]).astype(np.int64)
    idle = 0.0
    for lower, upper in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        dear, long = when[costs >= upper], when[most > lower]
        near = _least_missing(dear, np.cumsum(np.bincount(long, minlength=when[-1] + 1)), width, reach)
        anywhere = _fewest_rows(dear, reach, width) * width - len(long)
        idle += max(near, anywhere) * (upper - lower)
    return idle / (idle + float(costs.sum()))


def rank_bound(costs: list[FloatArray], ranks: int) -> float:
    """The same where ranks meet once a step: ``costs`` are those of each step's samples."""
    total = sum(float(of_step.sum()) for of_step in costs)
    time = sum(max(float(of_step.sum()) / ranks, float(of_step.max(initial=0.0))) for of_step in costs)
    return 1 - total / ranks / time if time else 0.0


@compiled
def _least_missing(dear: IntArray, longs: IntArray, width: int, reach: int) -> int:
    """Bins that stay below a level in the rows that hold ``dear``, wherever in time these rows are put.

    A row holds samples of ``reach + 1`` steps. Rows are chosen one after another, the next so that it takes in the
    first of ``dear`` that no row before it did; two rows that overlap share the long samples of their common steps.

    Args:
        dear: ``[n]`` the steps of samples that must be in one of the rows, never falling.
        longs: ``[steps]`` long samples, one of which every bin that reaches the level needs, up to each step.
        width: bins of a row.
        reach: the most steps between two samples of a row.
    """
    steps = len(longs)
    missing = np.full(steps, width * (len(dear) + 1), dtype=np.int64)  # by the last step of the last row so far
    least = width * (len(dear) + 1)
    for last in range(-1, steps):
        so_far, used, following = 0, 0, 0
        if last >= 0:
            so_far = missing[last]
            if so_far > width * len(dear):
                continue
            before = longs[last - reach - 1] if last > reach else 0
            used = min(longs[last], before + width)
            following = int(np.searchsorted(dear, last, side="right"))
        if following == len(dear):
            least = min(least, so_far)
            continue
        first = dear[following]
        for end in range(first, min(first + reach + 1, steps)):
            before = max(used, longs[end - reach - 1] if end > reach else 0)
            lacking = width - min(width, longs[end] - before)
            missing[end] = min(missing[end], so_far + lacking)
    return least


def _fewest_rows(steps: IntArray, reach: int, width: int) -> int:
    """Rows without which samples at ``steps`` cannot each have a bin of their own."""
    rows, members, first = 0, width, 0
    for step in steps.tolist():
        if members == width or step - first > reach:
            rows, members, first = rows + 1, 0, step
        members += 1
    return rows
