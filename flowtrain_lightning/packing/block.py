"""A few steps planned together: draw, hold back what has no match yet, fill rows, deal rows to steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.drawing import Supply, draw
from flowtrain_lightning.packing.evening import even_out
from flowtrain_lightning.packing.fitting import best_fit
from flowtrain_lightning.packing.grouping import fitting_count, group_rows
from flowtrain_lightning.packing.holding import Shape, held_back, most_held, steps_to_meet
from flowtrain_lightning.packing.microbatches import group_alike, positive_costs
from flowtrain_lightning.packing.plan import BoolArray, IntArray
from flowtrain_lightning.packing.rows import fill_rows
from flowtrain_lightning.packing.trading import trade_and_even

_FEW = 8
"""Samples per microbatch below which the best fit is grouped into rows; above, rows are filled one by one."""
_TRIALS = 40
"""Times that fewer samples are drawn because not all found room."""
_FREE = 0.01
"""Share of the microbatches that are left free at first where few samples share one: room to match costs."""
_DEFERRED = 0.05
"""Share of a block's samples that deferring long ones may make up for."""
_EXAMINED = 3
"""Times that samples to hold back are looked for."""


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
    rows, width, budget = shape.rows, shape.width, shape.budget
    capacity = fill * rows * width * budget
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
        order, bin_of, held, taken = _match(supply, may_wait, steps, cost, shape)
    else:
        order, bin_of, held, taken = _fill(supply, may_wait, steps, capacity, max_delay, ended, cost, shape)
    tokens, waited = supply.tokens[order], supply.drawn[order] < next_step
    costs = positive_costs(tokens, cost)
    bins = steps * rows * width
    _make_room(bin_of, tokens, waited, bins, budget)
    even_out(bin_of, np.arange(bins) // width, steps * rows, tokens, costs, bins, budget)
    deadline = supply.drawn[order] + max_delay - next_step
    if few:
        trade_and_even(bin_of, deadline >= steps - 1, width, tokens, costs, bins, budget)
    step_of, place = _deal(bin_of, deadline, steps, rows, width)
    everything = np.concatenate([order, held])
    nothing = np.full(len(held), -1, dtype=np.int64)
    return Block(
        steps,
        next_sample + taken,
        supply.samples[everything],
        supply.tokens[everything],
        supply.drawn[everything],
        np.concatenate([step_of, nothing]),
        np.concatenate([place, nothing]),
    )


def _match(
    supply: Supply, may_wait: BoolArray, steps: int, cost: CostModel, shape: Shape
) -> tuple[IntArray, IntArray, IntArray, int]:
    """Rows where few samples share a microbatch: members of the block, their bins, those held back, and drawn ones."""
    rows, width, budget = steps * shape.rows, shape.width, shape.budget
    bins = rows * width
    if may_wait[supply.old :].all():
        bins -= int(_FREE * bins)
    in_turn = np.append(np.argsort(may_wait[: supply.old], kind="stable"), np.arange(supply.old, len(may_wait)))
    order = held = in_turn[:0]
    for examined in range(_EXAMINED + 1):
        chosen = in_turn[~np.isin(in_turn, held)]
        chosen = chosen[: fitting_count(supply.tokens[chosen], bins, budget)]
        order = chosen[np.argsort(-supply.tokens[chosen], kind="stable")]
        if examined == _EXAMINED:
            break
        # Those that are drawn in place of the ones held back may be such themselves.
        more = order[held_back(supply.tokens[order], may_wait[order], cost, shape)]
        if len(more) == 0:
            break
        held = np.concatenate([held, more])[: most_held(shape)]
    costs = positive_costs(supply.tokens[order], cost)
    bin_of = group_rows(supply.tokens[order], costs, rows, width, budget)
    left = order[bin_of < 0]
    if len(left) > shape.rows * width // 2 or not may_wait[left].all():
        bin_of = group_alike(best_fit(supply.tokens[order], budget, rows * width)[0], costs, rows, width)
    count = max(supply.old, int(max(order.max(initial=0), held.max(initial=0))) + 1)
    return order, bin_of, np.setdiff1d(np.arange(count), order), count - supply.old


def _fill(
    supply: Supply,
    may_wait: BoolArray,
    steps: int,
    capacity: float,
    max_delay: int,
    ended: bool,
    cost: CostModel,
    shape: Shape,
) -> tuple[IntArray, IntArray, IntArray, int]:
    """Rows of many samples: members of the block, their bins, those held back, and how many were drawn."""
    rows, width = shape.rows, shape.width
    # What is left over waits for the next block. Where it would then be due at once, it must be little.
    spare = 0.25 * capacity if max_delay >= steps else 0.0
    most_left = len(supply.tokens) if max_delay >= 2 * steps - 1 else rows * width // 2
    # Samples per token so far: a block with many long samples leaves some of them to the next.
    steady = not ended and supply.step >= 2 * steps and max_delay >= 2 * steps - 1
    pace = (supply.samples[supply.old] - supply.old) / (supply.step * capacity) if steady else 0.0
    wanted = steps * capacity
    for _ in range(_TRIALS):
        order, held, taken = _choose(supply, may_wait, wanted, cost, pace, shape)
        tokens = supply.tokens[order]
        costs = positive_costs(tokens, cost)
        bin_of = fill_rows(tokens, costs, costs[-1] / tokens[-1], steps * rows, width, shape.budget)
        left = tokens[bin_of < 0]
        rest = int(left.sum())
        if rest <= 2 * spare and len(left) + len(held) <= most_left:
            break
        wanted -= max(rest - spare, 0.005 * wanted)
    return order, bin_of, held, taken


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


def _choose(
    supply: Supply, may_wait: BoolArray, wanted: float, cost: CostModel, pace: float, shape: Shape
) -> tuple[IntArray, IntArray, int]:
    """Members of the block, longest first; those held back; and how many were drawn of the stream."""
    ahead = np.cumsum(supply.tokens[supply.old :])
    needed = max(wanted - supply.tokens[: supply.old].sum(), 0 if supply.old else supply.tokens[0])
    held = np.empty(0, dtype=np.int64)
    for _ in range(3):
        taken = int(np.searchsorted(ahead, needed + supply.tokens[held].sum(), side="right"))
        order = np.argsort(-supply.tokens[: supply.old + taken], kind="stable")
        former, held = held, order[held_back(supply.tokens[order], may_wait[order], cost, shape)]
        if len(held) == len(former):
            break
    if pace > 0:
        held = np.concatenate([held, _defer(order, held, supply, wanted, pace, shape)])
    taken = int(np.searchsorted(ahead, needed + supply.tokens[held].sum(), side="right"))
    held = held[held < supply.old + taken]
    stays = np.ones(supply.old + taken, dtype=bool)
    stays[held] = False
    members = np.flatnonzero(stays)
    return members[np.argsort(-supply.tokens[members], kind="stable")], held, taken


def _defer(order: IntArray, held: IntArray, supply: Supply, wanted: float, pace: float, shape: Shape) -> IntArray:
    """Long samples to leave to the next block where this one would have fewer samples than those before."""
    rows, width = shape.rows, shape.width
    missing = pace * wanted - (len(order) - len(held))
    later = order[~np.isin(order, held)][3 * width : (3 + 3 * rows) * width]
    later = later[later >= supply.old]
    gain = np.cumsum(supply.tokens[later] * pace - 1)
    return later[: int(np.searchsorted(gain, min(missing, _DEFERRED * pace * wanted)))]


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
