"""Selection: which samples of the buffer a block takes, which it defers, and how they fill its balance groups.

One way for a few samples per microbatch, :func:`select_sparse`, and one for many, :func:`select_dense`. Both defer
samples that cost more than any balance group of the block until others like them have come. Such a sample is an
*outlier*: the other microbatches of its group would idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.packing.bin_packing import best_fit, fitting_count
from flowtrain_lightning.packing.dense_groups import fill_groups
from flowtrain_lightning.packing.microbatches import sort_into_groups
from flowtrain_lightning.packing.sample_stream import SampleBuffer, StreamSettings
from flowtrain_lightning.packing.sparse_groups import match_groups
from flowtrain_lightning.packing.step_plan import BoolArray, FloatArray, IntArray

_FREE = 0.01
"""Share of the microbatches that stay free at first where few samples share one: space to match costs."""
_EXAMINED = 3
"""Times that samples to defer are looked for, where few share a microbatch."""
_TRIALS = 40
"""Times that fewer samples are drawn because not all fitted, where many share a microbatch."""
_MADE_UP_FOR = 0.05
"""Share of a block's samples that deferring long ones may make up for."""


@dataclass(frozen=True)
class Selection:
    """The samples that a block takes of its buffer.

    Attributes:
        members: ``[n]`` indices into the buffer, of the longest sample first.
        bin_of: ``[n]`` the microbatch of each, ``group * balance_group + slot``, or -1 where a sample fitted nowhere.
        deferred: indices into the buffer of those that wait.
        drawn: how many were drawn of the stream.
    """

    members: IntArray
    bin_of: IntArray
    deferred: IntArray
    drawn: int


def select_sparse(buffer: SampleBuffer, may_wait: BoolArray, steps: int, settings: StreamSettings) -> Selection:
    """Where few samples share a microbatch: those that can be matched with others, in groups of their like.

    Args:
        buffer: what may be taken.
        may_wait: ``[n]`` whether each may stay out of the block.
        steps: of the block.
        settings: how the stream is cut.
    """
    groups, size, budget = steps * settings.groups, settings.balance_group, settings.token_budget
    bins = groups * size
    if may_wait[buffer.waiting :].all():
        bins -= int(_FREE * bins)
    in_turn = np.append(np.argsort(may_wait[: buffer.waiting], kind="stable"), np.arange(buffer.waiting, len(may_wait)))
    order = deferred = in_turn[:0]
    for examined in range(_EXAMINED + 1):
        chosen = in_turn[~np.isin(in_turn, deferred)]
        chosen = chosen[: fitting_count(buffer.tokens[chosen], bins, budget)]
        order = chosen[np.argsort(-buffer.tokens[chosen], kind="stable")]
        if examined == _EXAMINED:
            break
        # Those that are drawn in place of the deferred ones may be such themselves.
        more = order[deferred_samples(buffer.tokens[order], may_wait[order], settings)]
        if len(more) == 0:
            break
        deferred = np.concatenate([deferred, more])[: most_deferred(settings)]
    tokens = buffer.tokens[order]
    costs = settings.cost.weight_of_each(tokens)
    bin_of = match_groups(tokens, costs, groups, size, budget)
    left = order[bin_of < 0]
    if len(left) > settings.microbatches // 2 or not may_wait[left].all():
        bin_of = sort_into_groups(best_fit(tokens, budget, groups * size)[0], costs, groups, size)
    count = max(buffer.waiting, int(max(order.max(initial=0), deferred.max(initial=0))) + 1)
    return Selection(order, bin_of, np.setdiff1d(np.arange(count), order), count - buffer.waiting)


def select_dense(buffer: SampleBuffer, may_wait: BoolArray, steps: int, settings: StreamSettings) -> Selection:
    """Where many samples share a microbatch: as many as fill the groups, one group after another.

    Args:
        buffer: what may be taken.
        may_wait: ``[n]`` whether each may stay out of the block.
        steps: of the block.
        settings: how the stream is cut.
    """
    step_tokens, max_delay = settings.step_tokens, settings.max_delay
    # What is left over waits for the next block. Where it would then be due at once, it must be little.
    spare = 0.25 * step_tokens if max_delay >= steps else 0.0
    waits_for_a_block = max_delay >= 2 * steps - 1
    most_left = len(buffer.tokens) if waits_for_a_block else settings.microbatches // 2
    # Samples per token so far: a block with many long samples leaves some of them to the next.
    pace = 0.0
    if waits_for_a_block and not buffer.ended and buffer.step >= 2 * steps:
        pace = (buffer.samples[buffer.waiting] - buffer.waiting) / (buffer.step * step_tokens)
    wanted = steps * step_tokens
    for _ in range(_TRIALS):
        order, deferred, drawn = _choose(buffer, may_wait, wanted, pace, settings)
        tokens = buffer.tokens[order]
        costs = settings.cost.weight_of_each(tokens)
        bin_of = fill_groups(tokens, costs, steps * settings.groups, settings.balance_group, settings.token_budget)
        left = tokens[bin_of < 0]
        rest = int(left.sum())
        if rest <= 2 * spare and len(left) + len(deferred) <= most_left:
            break
        wanted -= max(rest - spare, 0.005 * wanted)
    return Selection(order, bin_of, deferred, drawn)


def _choose(
    buffer: SampleBuffer, may_wait: BoolArray, wanted: float, pace: float, settings: StreamSettings
) -> tuple[IntArray, IntArray, int]:
    """Members of the block, longest first; those deferred; and how many were drawn of the stream."""
    waiting = buffer.waiting
    ahead = np.cumsum(buffer.tokens[waiting:])
    needed = max(wanted - buffer.tokens[:waiting].sum(), 0 if waiting else buffer.tokens[0])
    deferred = np.empty(0, dtype=np.int64)
    for _ in range(3):
        drawn = int(np.searchsorted(ahead, needed + buffer.tokens[deferred].sum(), side="right"))
        order = np.argsort(-buffer.tokens[: waiting + drawn], kind="stable")
        former = deferred
        deferred = order[deferred_samples(buffer.tokens[order], may_wait[order], settings)]
        if len(deferred) == len(former):
            break
    if pace > 0:
        deferred = np.concatenate([deferred, _long_for_later(order, deferred, buffer, wanted, pace, settings)])
    drawn = int(np.searchsorted(ahead, needed + buffer.tokens[deferred].sum(), side="right"))
    deferred = deferred[deferred < waiting + drawn]
    stays = np.ones(waiting + drawn, dtype=bool)
    stays[deferred] = False
    members = np.flatnonzero(stays)
    return members[np.argsort(-buffer.tokens[members], kind="stable")], deferred, drawn


def _long_for_later(
    order: IntArray, deferred: IntArray, buffer: SampleBuffer, wanted: float, pace: float, settings: StreamSettings
) -> IntArray:
    """Long samples to leave to the next block where this one would have fewer samples than those before."""
    size = settings.balance_group
    missing = pace * wanted - (len(order) - len(deferred))
    later = order[~np.isin(order, deferred)][3 * size : (3 + 3 * settings.groups) * size]
    later = later[later >= buffer.waiting]
    gain = np.cumsum(buffer.tokens[later] * pace - 1)
    return later[: int(np.searchsorted(gain, min(missing, _MADE_UP_FOR * pace * wanted)))]


_MATCHED = 0.01
"""Idle share of a group up to which its samples count as matched: they need not wait for others like them."""
_OUTLIER = 0.04
"""Idle share of a group from which on a sample is an outlier, for which blocks are cut."""
_AGAIN = 0.5
"""Expected cost of an outlier that waits further, as a share of its cost now."""
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
    """Counts the steps to plan, so that outliers share groups with as many of their like as can be.

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
