"""A few steps planned together: draw, hold back what has no match yet, fill rows, deal rows to steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.drawing import Supply, draw
from flowtrain_lightning.packing.evening import even_out
from flowtrain_lightning.packing.holding import Shape, steps_to_meet
from flowtrain_lightning.packing.microbatches import positive_costs
from flowtrain_lightning.packing.plan import BoolArray, IntArray
from flowtrain_lightning.packing.taking import Taken, take_few, take_many
from flowtrain_lightning.packing.trading import trade_and_even

_FEW = 8
"""Samples per microbatch below which the best fit is grouped into rows; above, rows are filled one by one."""


@dataclass(frozen=True)
class Block:
    """The plan of a block.

    Attributes:
        steps: how many; fewer at the end of the stream.
        next_sample: the first sample that was not drawn.
        samples: ``[n]`` all that were drawn or waited.
        tokens: ``[n]`` of each.
        drawn: ``[n]`` the step at which each was drawn.
        step_of: ``[n]`` the step of each, counted in the block, or -1 for those that wait.
        bin_of: ``[n]`` the microbatch in its step, ``row * width + column``.
    """

    steps: int
    next_sample: int
    samples: IntArray
    tokens: IntArray
    drawn: IntArray
    step_of: IntArray
    bin_of: IntArray


def steps_in_block(max_delay: int, lookahead: int) -> int:
    """The length of a block that lets a sample meet those of as many steps as possible before it must go."""
    longest = max(1, min(lookahead + 1, max_delay))
    return max(range(1, longest + 1), key=lambda steps: ((max_delay // steps + 1) * steps, steps))


def plan_block(
    lengths: Callable[[int, int], IntArray],
    next_sample: int,
    next_step: int,
    waiting: tuple[IntArray, IntArray, IntArray],
    *,
    shape: Shape,
    fill: float,
    max_delay: int,
    lookahead: int,
    cost: CostModel,
) -> Block:
    """Plan the next few steps, or as many as the end of the stream allows.

    Args:
        lengths: tokens of samples ``start`` to ``end`` of the stream.
        next_sample: the first sample to draw.
        next_step: the number of the block's first step.
        waiting: samples that wait, their tokens, and the steps at which they were drawn.
        shape: of a step.
        fill: share of the budget to use.
        max_delay: steps that a sample may wait.
        lookahead: steps whose samples may be drawn before they are needed.
        cost: what a packed set of sequences costs.
    """
    width, budget = shape.width, shape.budget
    capacity = fill * shape.rows * width * budget
    old, old_tokens, old_drawn = waiting
    most_steps = max(1, min(lookahead + 1, max_delay))
    new_tokens, ended = draw(lengths, next_sample, most_steps * capacity + (3 * width + 1) * budget)
    available = int(old_tokens.sum() + new_tokens.sum())
    most_steps = min(most_steps, int(available // capacity))
    if most_steps == 0:
        return _unplanned(next_sample, waiting)
    supply = Supply(old, old_tokens, old_drawn, new_tokens, next_sample, next_step)
    steps = _steps(
        supply, min(steps_in_block(max_delay, lookahead), most_steps), most_steps, capacity, max_delay, cost, shape
    )
    may_wait = next_step + steps - supply.drawn <= max_delay
    if ended and steps == int(available // capacity):
        # Of the last steps only those wait that have no place in them anyway.
        longest = np.argsort(-supply.tokens, kind="stable")
        may_wait[longest[np.cumsum(supply.tokens[longest]) > available - steps * capacity]] = False
    few = bool(supply.tokens.mean() * _FEW > budget)
    if few:
        taken = take_few(supply, may_wait, steps, cost, shape)
    else:
        taken = take_many(supply, may_wait, steps, capacity, max_delay, ended, cost, shape)
    step_of, place = _placed(supply, taken, steps, max_delay, few, cost, shape)
    everything = np.concatenate([taken.members, taken.held])
    nothing = np.full(len(taken.held), -1, dtype=np.int64)
    return Block(
        steps,
        next_sample + taken.drawn,
        supply.samples[everything],
        supply.tokens[everything],
        supply.drawn[everything],
        np.concatenate([step_of, nothing]),
        np.concatenate([place, nothing]),
    )


def _placed(
    supply: Supply, taken: Taken, steps: int, max_delay: int, few: bool, cost: CostModel, shape: Shape
) -> tuple[IntArray, IntArray]:
    """The step of each member and its microbatch there, once rows are even and dealt; -1 and -1 if it waits."""
    bin_of, tokens, drawn = taken.bin_of.copy(), supply.tokens[taken.members], supply.drawn[taken.members]
    costs = positive_costs(tokens, cost)
    rows, width, budget = steps * shape.rows, shape.width, shape.budget
    bins = rows * width
    _make_room(bin_of, tokens, drawn < supply.step, bins, budget)
    even_out(bin_of, np.arange(bins) // width, rows, tokens, costs, bins, budget)
    deadline = drawn + max_delay - supply.step
    if few:
        trade_and_even(bin_of, deadline >= steps - 1, width, tokens, costs, bins, budget)
    return _deal(bin_of, deadline, steps, shape.rows, width)


def _steps(
    supply: Supply, steps: int, most_steps: int, capacity: float, max_delay: int, cost: CostModel, shape: Shape
) -> int:
    """How many steps to plan: see ``steps_to_meet``."""
    before = np.cumsum(supply.tokens) - supply.tokens
    seen = int(np.searchsorted(before, steps * capacity))
    order = np.argsort(-supply.tokens[:seen], kind="stable")
    due = np.where(order < supply.old, supply.drawn[order] + max_delay - supply.step, -1)
    return steps_to_meet(
        supply.tokens[order], due, before[order] / capacity, cost, shape, steps=steps, most_steps=most_steps
    )


def _make_room(bin_of: IntArray, tokens: IntArray, waited: BoolArray, bins: int, budget: int) -> None:
    """Put samples that have waited and found no room in the place of younger ones, as alike as possible."""
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


def _deal(bin_of: IntArray, deadline: IntArray, steps: int, rows: int, width: int) -> tuple[IntArray, IntArray]:
    """Rows to steps: each as early as its samples must go, else so that steps have equal numbers of samples."""
    placed = np.flatnonzero(bin_of >= 0)
    bins = steps * rows * width
    last = np.full(bins, steps - 1, dtype=np.int64)
    np.minimum.at(last, bin_of[placed], deadline[placed])
    due = last.reshape(-1, width).min(axis=1)
    sizes = np.bincount(bin_of[placed] // width, minlength=steps * rows)
    lacking, free = np.full(steps, sizes.sum() / steps), np.full(steps, rows)
    home = np.empty((steps * rows, 2), dtype=np.int64)
    for row in np.lexsort((-sizes, due)).tolist():
        open_steps = np.flatnonzero(free[: due[row] + 1])
        if len(open_steps) == 0:
            open_steps = np.flatnonzero(free)
        step = int(open_steps[np.argmax(lacking[open_steps] / free[open_steps])])
        home[row] = step, rows - free[step]
        free[step] -= 1
        lacking[step] -= sizes[row]
    step_of_bin = home[:, 0].repeat(width)
    place = home[:, 1].repeat(width) * width + np.tile(np.arange(width), steps * rows)
    for late in np.flatnonzero(step_of_bin > last).tolist():
        # A bin that comes too late changes places with one that may come later.
        for other in np.flatnonzero((step_of_bin <= last[late]) & (last >= step_of_bin[late])).tolist():
            step_of_bin[[late, other]] = step_of_bin[[other, late]]
            place[[late, other]] = place[[other, late]]
            break
    return np.where(bin_of >= 0, step_of_bin[bin_of], -1), np.where(bin_of >= 0, place[bin_of], -1)


def _unplanned(next_sample: int, waiting: tuple[IntArray, IntArray, IntArray]) -> Block:
    samples, tokens, drawn = waiting
    nowhere = np.full(len(samples), -1, dtype=np.int64)
    return Block(0, next_sample, samples, tokens, drawn, nowhere, nowhere)
