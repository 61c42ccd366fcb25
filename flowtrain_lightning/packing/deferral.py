"""Deferral: samples that cost more than any balance group of a block wait until others like them have come.

Such a sample is an *outlier*: the other microbatches of its group would idle.
"""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.sample_stream import StreamSettings
from flowtrain_lightning.packing.step_plan import BoolArray, FloatArray, IntArray

_MATCHED = 0.01
"""Idle share of a group up to which its samples count as matched: they need not wait for others like them."""
_OUTLIER = 0.04
"""Idle share of a group from which on a sample is an outlier, for which blocks are cut."""
_AGAIN = 0.5
"""What an outlier that waits further is expected to cost in the end, as a share of what it would cost now."""
_COMPANY = 0.75
"""Samples deferred as long as any are, as a share of a group: the longest of the rest, to fill an outlier's group."""
_MOST_EXAMINED = 64
"""The longest samples of a block, of which some may wait."""
_USABLE = 0.98
"""Share of the budget that samples like a long one can fill."""


def most_deferred(settings: StreamSettings) -> int:
    """Samples that may be kept out of a block: as many as one step can take once they must go."""
    return min(2 * settings.balance_group, settings.microbatches // 2)


def deferred_samples(lengths: IntArray, may_wait: BoolArray, settings: StreamSettings) -> IntArray:
    """The samples to keep out of a block.

    Groups are made of neighbours in length. A group that would idle is not made while all its samples may wait, since
    more of their kind will come. Once one of them must go, its group is made: with the costlier ones that still may
    wait, or without them, whichever is expected to idle less in the end.

    Args:
        lengths: ``[samples]`` tokens, falling.
        may_wait: ``[samples]`` whether each may stay out of this block.
        settings: how the stream is cut.

    Returns:
        Indices into ``lengths``, rising.
    """
    size, most = settings.balance_group, most_deferred(settings)
    idle = _idle_shares(lengths, settings)
    waste = idle * settings.cost.weight_of_each(lengths[: len(idle)])
    deferred: list[int] = []
    item = rest = 0
    while item < len(idle) and len(deferred) < most:
        if idle[item] <= _MATCHED:
            item += size
            continue
        due = np.flatnonzero(~may_wait[item : item + size])
        if len(due) == 0:
            deferred.append(item)
            item = rest = item + 1
            continue
        wasted = waste[item : item + int(due[0]) + 1].copy()
        wasted[1:] += _AGAIN * wasted[0]
        first = item + int(np.argmin(wasted))
        deferred += range(item, first)
        item = rest = first + size
    wanted = min(most, int(_COMPANY * size)) if deferred else 0
    company = rest + np.flatnonzero(may_wait[rest : rest + 4 * size])
    return np.array(deferred + company[: max(0, wanted - len(deferred))].tolist(), dtype=np.int64)[:most]


def steps_for_outliers(
    lengths: IntArray, due: IntArray, before: FloatArray, settings: StreamSettings, *, steps: int, most_steps: int
) -> int:
    """How many steps to plan, so that outliers share groups with as many of their like as can be.

    The wait of a sample counts from the step at which it is drawn. So a block ends before the first outlier would be
    drawn; and where outliers wait, blocks end where they must go, which the last of them does with as many steps'
    samples in sight as may be.

    Args:
        lengths: ``[samples]`` tokens, falling.
        due: ``[samples]`` steps for which each that waits already may still do so; -1 where it was not drawn yet.
        before: ``[samples]`` steps' worth of samples that come before each in the stream.
        settings: how the stream is cut.
        steps: those to plan where there is no outlier.
        most_steps: the most that may be planned.
    """
    usual = np.flatnonzero(_idle_shares(lengths, settings) <= _OUTLIER)
    outliers = slice(0, int(usual[0]) if len(usual) else _MOST_EXAMINED)
    waits = due[outliers][due[outliers] >= 0]
    if len(waits):
        nearest = int(waits.min())
        return steps if nearest > most_steps else nearest or most_steps
    first = float(before[outliers].min(initial=np.inf))
    # Space for what will be deferred of the block, as samples behind it are drawn in its stead.
    company = lengths[outliers.stop : outliers.stop + settings.balance_group].sum()
    steps_of_company = company / (settings.microbatches * settings.token_budget)
    return min(steps, max(0, int(min(first - steps_of_company, steps)))) or steps


def _idle_shares(lengths: IntArray, settings: StreamSettings) -> FloatArray:
    """``[at most _MOST_EXAMINED]`` of a group that begins with each sample: the share of its time that it must idle."""
    size, budget, cost = settings.balance_group, settings.token_budget, settings.cost
    top = lengths[: _MOST_EXAMINED + size - 1].astype(np.float64)
    if len(top) < size:
        return np.zeros(0)
    alike = np.floor(_USABLE * budget / top)
    most = cost.linear * budget + cost.quadratic * (alike * top**2 + (budget - alike * top) ** 2)
    groups = np.lib.stride_tricks.sliding_window_view(most, size)
    costs = cost.weight_of_each(lengths[: len(groups)])
    shares: FloatArray = np.maximum(0.0, costs[:, None] - groups).sum(axis=1) / (costs * size)
    return shares
