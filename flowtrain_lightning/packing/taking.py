"""Which samples a block takes, and how they fill its rows: one way for a few per microbatch, one for many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.drawing import Supply
from flowtrain_lightning.packing.fitting import best_fit
from flowtrain_lightning.packing.grouping import fitting_count, group_rows
from flowtrain_lightning.packing.holding import Shape, held_back, most_held
from flowtrain_lightning.packing.microbatches import group_alike, positive_costs
from flowtrain_lightning.packing.plan import BoolArray, IntArray
from flowtrain_lightning.packing.rows import fill_rows

_TRIALS = 40
"""Times that fewer samples are drawn because not all found room."""
_FREE = 0.01
"""Share of the microbatches that are left free at first where few samples share one: room to match costs."""
_DEFERRED = 0.05
"""Share of a block's samples that deferring long ones may make up for."""
_EXAMINED = 3
"""Times that samples to hold back are looked for."""


@dataclass(frozen=True)
class Taken:
    """What a block takes of its supply.

    Attributes:
        members: ``[n]`` places in the supply, of the longest sample first.
        bin_of: ``[n]`` the bin of each, ``row * width + column``, or -1 where none was found.
        held: places in the supply of those that wait.
        drawn: how many were drawn of the stream.
    """

    members: IntArray
    bin_of: IntArray
    held: IntArray
    drawn: int


def take_few(supply: Supply, may_wait: BoolArray, steps: int, cost: CostModel, shape: Shape) -> Taken:
    """Where few samples share a microbatch: those that can be matched with others, in rows of their like.

    Args:
        supply: what may be taken.
        may_wait: ``[samples]`` whether each may stay out of the block.
        steps: of the block.
        cost: what a packed set of sequences costs.
        shape: of a step.
    """
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
    return Taken(order, bin_of, np.setdiff1d(np.arange(count), order), count - supply.old)


def take_many(
    supply: Supply,
    may_wait: BoolArray,
    steps: int,
    capacity: float,
    max_delay: int,
    ended: bool,
    cost: CostModel,
    shape: Shape,
) -> Taken:
    """Where many samples share a microbatch: as many as fill the rows, one row after another.

    Args:
        supply: what may be taken.
        may_wait: ``[samples]`` whether each may stay out of the block.
        steps: of the block.
        capacity: tokens of a step.
        max_delay: steps that a sample may wait.
        ended: the supply is all that is left of the stream.
        cost: what a packed set of sequences costs.
        shape: of a step.
    """
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
    return Taken(order, bin_of, held, taken)


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
