"""Selection: which samples of the buffer a block takes, and how they fill its balance groups.

One way for a few samples per microbatch, :func:`select_sparse`, and one for many, :func:`select_dense`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.packing.bin_packing import best_fit, fitting_count
from flowtrain_lightning.packing.deferral import deferred_samples, most_deferred
from flowtrain_lightning.packing.dense_groups import fill_groups
from flowtrain_lightning.packing.microbatches import sort_into_groups
from flowtrain_lightning.packing.sample_stream import SampleBuffer, StreamSettings
from flowtrain_lightning.packing.sparse_groups import match_groups
from flowtrain_lightning.packing.step_plan import BoolArray, IntArray

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
    """What a block takes of its buffer.

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
