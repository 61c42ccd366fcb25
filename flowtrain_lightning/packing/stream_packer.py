"""Cuts an endless stream of samples into steps that are a number of microbatches, a block of steps at a time.

The samples of a block are sorted into balance groups; these are then dealt to the block's steps so that every step has
its share of short and long samples. A sample that costs more than any group of its block waits for a later block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from flowtrain_lightning.packing.load_balancing import rebalance
from flowtrain_lightning.packing.sample_stream import (
    Lengths,
    SampleBuffer,
    StreamSettings,
    StreamState,
    StreamStep,
    fill_buffer,
)
from flowtrain_lightning.packing.selection import Selection, select_dense, select_sparse, steps_for_outliers
from flowtrain_lightning.packing.sparse_groups import swap_and_rebalance
from flowtrain_lightning.packing.step_plan import BoolArray, IntArray

_FEW = 8
"""Samples per microbatch below which the best fit is sorted into groups; above, groups are filled one by one."""


@dataclass(frozen=True)
class Block:
    """A few steps that are planned together.

    Attributes:
        steps: how many; fewer at the end of the stream.
        next_sample: the first sample that was not drawn.
        samples: ``[n]`` all that were drawn or waited.
        tokens: ``[n]`` of each.
        drawn: ``[n]`` the step at which each was drawn.
        step_of: ``[n]`` the step of each, counted in the block, or -1 for those that wait.
        bin_of: ``[n]`` the microbatch in its step, ``group * balance_group + slot``, or -1 for those that wait.
    """

    steps: int
    next_sample: int
    samples: IntArray
    tokens: IntArray
    drawn: IntArray
    step_of: IntArray
    bin_of: IntArray


@dataclass
class StreamPacker:
    """Cuts a stream of samples into steps, one after another.

    Attributes:
        settings: what the steps depend on.
        lengths: the stream.
        state: where it stands; saved and given again, the steps go on as if nothing had happened.
    """

    settings: StreamSettings
    lengths: Lengths
    state: StreamState = field(default_factory=StreamState)
    _block: Block | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[StreamStep]:
        return self

    def __next__(self) -> StreamStep:
        if self._block is None:
            self._block = plan_block(self.lengths, self.state, self.settings)
        if self.state.given == self._block.steps:
            if self._block.steps == 0:
                raise StopIteration
            self.state = self._following(self._block)
            self._block = plan_block(self.lengths, self.state, self.settings)
            return next(self)
        block, offset = self._block, self.state.given
        members = np.flatnonzero(block.step_of == offset)
        members = members[np.argsort(block.samples[members], kind="stable")]
        number = self.state.next_step + offset
        self.state = replace(self.state, given=offset + 1)
        return StreamStep(
            number, block.samples[members], block.tokens[members], block.bin_of[members], number - block.drawn[members]
        )

    def left(self) -> IntArray:
        """``[n]`` samples that no step took, once the stream has ended: too few for one more step."""
        block = self._block or plan_block(self.lengths, self.state, self.settings)
        rest = self.lengths(block.next_sample, 1 << 62)
        undrawn = np.arange(block.next_sample, block.next_sample + len(rest), dtype=np.int64)
        return np.sort(np.concatenate([block.samples[block.step_of < 0], undrawn]))

    def _following(self, block: Block) -> StreamState:
        waits = np.flatnonzero(block.step_of < 0)
        return StreamState(
            next_sample=block.next_sample,
            next_step=self.state.next_step + block.steps,
            waiting=tuple(block.samples[waits].tolist()),
            drawn=tuple(block.drawn[waits].tolist()),
        )


def steps_in_block(max_delay: int, lookahead: int) -> int:
    """The length of a block that lets a sample that waits share groups with those of as many steps as possible."""
    longest = max(1, min(lookahead + 1, max_delay))
    return max(range(1, longest + 1), key=lambda steps: ((max_delay // steps + 1) * steps, steps))


def plan_block(lengths: Lengths, state: StreamState, settings: StreamSettings) -> Block:
    """Plan the next few steps, or as many as the end of the stream allows.

    Args:
        lengths: the stream.
        state: where it stands.
        settings: how it is cut.
    """
    step_tokens = settings.step_tokens
    most_steps = max(1, min(settings.lookahead + 1, settings.max_delay))
    reserve = (3 * settings.balance_group + 1) * settings.token_budget
    buffer = fill_buffer(lengths, state, most_steps * step_tokens + reserve)
    available = int(buffer.tokens.sum())
    whole_steps = int(available // step_tokens)
    most_steps = min(most_steps, whole_steps)
    if most_steps == 0:
        waiting = slice(0, buffer.waiting)
        nowhere = np.full(buffer.waiting, -1, dtype=np.int64)
        found = (buffer.samples[waiting], buffer.tokens[waiting], buffer.drawn[waiting], nowhere, nowhere)
        return Block(0, state.next_sample, *found)
    steps = _steps(buffer, most_steps, settings)
    may_wait = buffer.step + steps - buffer.drawn <= settings.max_delay
    if buffer.ended and steps == whole_steps:
        # Of the last steps only those samples wait that do not fit into them anyway.
        longest = np.argsort(-buffer.tokens, kind="stable")
        may_wait[longest[np.cumsum(buffer.tokens[longest]) > available - steps * step_tokens]] = False
    is_sparse = bool(buffer.tokens.mean() * _FEW > settings.token_budget)
    select = select_sparse if is_sparse else select_dense
    selection = select(buffer, may_wait, steps, settings)
    step_of, bin_of = _dealt(buffer, selection, steps, is_sparse, settings)
    everything = np.concatenate([selection.members, selection.deferred])
    nothing = np.full(len(selection.deferred), -1, dtype=np.int64)
    return Block(
        steps,
        state.next_sample + selection.drawn,
        buffer.samples[everything],
        buffer.tokens[everything],
        buffer.drawn[everything],
        np.concatenate([step_of, nothing]),
        np.concatenate([bin_of, nothing]),
    )


def _steps(buffer: SampleBuffer, most_steps: int, settings: StreamSettings) -> int:
    """Counts the steps to plan, at most ``most_steps``."""
    steps = min(steps_in_block(settings.max_delay, settings.lookahead), most_steps)
    before = np.cumsum(buffer.tokens) - buffer.tokens
    seen = int(np.searchsorted(before, steps * settings.step_tokens))
    order = np.argsort(-buffer.tokens[:seen], kind="stable")
    due = np.where(order < buffer.waiting, buffer.drawn[order] + settings.max_delay - buffer.step, -1)
    steps_before = before[order] / settings.step_tokens
    return steps_for_outliers(buffer.tokens[order], due, steps_before, settings, steps=steps, most_steps=most_steps)


def _dealt(
    buffer: SampleBuffer, selection: Selection, steps: int, is_sparse: bool, settings: StreamSettings
) -> tuple[IntArray, IntArray]:
    """The step of each member and its microbatch there, once groups are balanced and dealt; -1 and -1 if it waits."""
    bin_of, members = selection.bin_of.copy(), selection.members
    tokens, drawn = buffer.tokens[members], buffer.drawn[members]
    costs = settings.cost.weight_of_each(tokens)
    groups, size, budget = steps * settings.groups, settings.balance_group, settings.token_budget
    _insert_waiting(bin_of, tokens, drawn < buffer.step, groups * size, budget)
    rebalance(bin_of, tokens, costs, groups, size, budget)
    deadline = drawn + settings.max_delay - buffer.step
    if is_sparse:
        swap_and_rebalance(bin_of, deadline >= steps - 1, tokens, costs, groups, size, budget)
    return _deal_groups(bin_of, deadline, steps, settings)


def _insert_waiting(bin_of: IntArray, tokens: IntArray, waited: BoolArray, bins: int, budget: int) -> None:
    """Put samples that have waited and fitted nowhere into the bin of younger ones, as alike as possible."""
    for item in np.flatnonzero((bin_of < 0) & waited).tolist():
        is_young = (bin_of >= 0) & ~waited
        longer = np.flatnonzero(is_young[:item])
        if len(longer):
            bin_of[item], bin_of[longer[-1]] = bin_of[longer[-1]], -1
            continue
        young = np.bincount(bin_of[is_young], tokens[is_young], minlength=bins)
        filled = np.bincount(bin_of[bin_of >= 0], tokens[bin_of >= 0], minlength=bins)
        chosen = int(np.argmax(budget - filled + young))
        if filled[chosen] - young[chosen] + tokens[item] > budget:
            continue
        for other in np.flatnonzero(is_young & (bin_of == chosen)).tolist():
            if filled[chosen] + tokens[item] > budget:
                bin_of[other] = -1
                filled[chosen] -= tokens[other]
        bin_of[item] = chosen


def _deal_groups(
    bin_of: IntArray, deadline: IntArray, steps: int, settings: StreamSettings
) -> tuple[IntArray, IntArray]:
    """Groups to steps: each as early as its samples must go, else so that steps have equal numbers of samples."""
    groups, size = settings.groups, settings.balance_group
    packed = np.flatnonzero(bin_of >= 0)
    last = np.full(steps * groups * size, steps - 1, dtype=np.int64)  # [bins] the last step at which each may run
    np.minimum.at(last, bin_of[packed], deadline[packed])
    due = last.reshape(-1, size).min(axis=1)
    samples = np.bincount(bin_of[packed] // size, minlength=steps * groups)
    lacking, free = np.full(steps, samples.sum() / steps), np.full(steps, groups)
    new_group = np.empty((steps * groups, 2), dtype=np.int64)  # the step of each group, and its number there
    for group in np.lexsort((-samples, due)).tolist():
        open_steps = np.flatnonzero(free[: due[group] + 1])
        if len(open_steps) == 0:
            open_steps = np.flatnonzero(free)
        step = int(open_steps[np.argmax(lacking[open_steps] / free[open_steps])])
        new_group[group] = step, groups - free[step]
        free[step] -= 1
        lacking[step] -= samples[group]
    step_of_bin = new_group[:, 0].repeat(size)
    new_bin = new_group[:, 1].repeat(size) * size + np.tile(np.arange(size), steps * groups)
    for late in np.flatnonzero(step_of_bin > last).tolist():
        # A bin that comes too late is exchanged for one that may come later.
        for other in np.flatnonzero((step_of_bin <= last[late]) & (last >= step_of_bin[late])).tolist():
            step_of_bin[[late, other]] = step_of_bin[[other, late]]
            new_bin[[late, other]] = new_bin[[other, late]]
            break
    return np.where(bin_of >= 0, step_of_bin[bin_of], -1), np.where(bin_of >= 0, new_bin[bin_of], -1)
