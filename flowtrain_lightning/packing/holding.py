"""Which samples wait for a later block: those dearer than any row of this one can be, and company for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.microbatches import positive_costs
from flowtrain_lightning.packing.plan import BoolArray, FloatArray, IntArray

_MATCHED = 0.01
"""Idle share of a row up to which its samples count as matched: they need not wait for others like them."""
_DEAR = 0.04
"""Idle share of a row from which on the blocks are cut so that its first sample meets as many others as possible."""
_AGAIN = 0.5
"""What a dear sample that waits further is expected to cost in the end, as a share of what it would cost now."""
_COMPANY = 0.75
"""Samples held back as long as any are, as a share of a row: the longest of the rest, to fill the row of a dear one."""
_MOST_EXAMINED = 64
"""The longest samples of a block, of which some may wait."""


@dataclass(frozen=True)
class Shape:
    """Of a step: its rows, the microbatches of a row, and the most tokens of a microbatch."""

    rows: int
    width: int
    budget: int


def most_held(shape: Shape) -> int:
    """Samples that may be held back of a block: as many as one step can take once they must go."""
    return min(2 * shape.width, shape.rows * shape.width // 2)


def held_back(lengths: IntArray, may_wait: BoolArray, cost: CostModel, shape: Shape) -> IntArray:
    """The samples to hold back.

    Rows are made of neighbours in length. A row that would idle is not made while all its samples may wait, since
    more of their kind will come. Once one of them must go, its row is made: with the dearer ones that still may wait,
    or without them, whichever is expected to idle less in the end.

    Args:
        lengths: ``[samples]`` tokens, falling.
        may_wait: ``[samples]`` whether each may stay out of this block.
        cost: what a packed set of sequences costs.
        shape: of a step.

    Returns:
        Positions in ``lengths``, rising.
    """
    width, most = shape.width, most_held(shape)
    idle = _idle_shares(lengths, cost, shape)
    waste = idle * positive_costs(lengths[: len(idle)], cost)
    held: list[int] = []
    item = rest = 0
    while item < len(idle) and len(held) < most:
        if idle[item] <= _MATCHED:
            item += width
            continue
        due = np.flatnonzero(~may_wait[item : item + width])
        if len(due) == 0:
            held.append(item)
            item = rest = item + 1
            continue
        wasted = waste[item : item + int(due[0]) + 1].copy()
        wasted[1:] += _AGAIN * wasted[0]
        first = item + int(np.argmin(wasted))
        held += range(item, first)
        item = rest = first + width
    wanted = min(most, int(_COMPANY * width)) if held else 0
    company = rest + np.flatnonzero(may_wait[rest : rest + 4 * width])
    return np.array(held + company[: max(0, wanted - len(held))].tolist(), dtype=np.int64)[:most]


def steps_to_meet(
    lengths: IntArray, due: IntArray, before: FloatArray, cost: CostModel, shape: Shape, *, steps: int, most_steps: int
) -> int:
    """How many steps to plan, so that samples far dearer than the others meet as many of their like as can be.

    The wait of a sample counts from the step at which it is drawn. So a block ends before the first dear sample
    would be drawn; and where dear samples wait, blocks end where they must go, which the last of them does with as
    many steps' samples in sight as may be.

    Args:
        lengths: ``[samples]`` tokens, falling.
        due: ``[samples]`` steps for which each that waits already may still do so; -1 where it was not drawn yet.
        before: ``[samples]`` steps' worth of samples that come before each in the stream.
        cost: what a packed set of sequences costs.
        shape: of a step.
        steps: those to plan where nothing is dear.
        most_steps: the most that may be planned.
    """
    unmatched = np.flatnonzero(_idle_shares(lengths, cost, shape) <= _DEAR)
    dear = slice(0, int(unmatched[0]) if len(unmatched) else _MOST_EXAMINED)
    waits = due[dear][due[dear] >= 0]
    if len(waits):
        nearest = int(waits.min())
        return steps if nearest > most_steps else nearest or most_steps
    first = float(before[dear].min(initial=np.inf))
    # Room for what will be held back of the block, as samples behind it are drawn in its place.
    company = lengths[dear.stop : dear.stop + shape.width].sum() / (shape.rows * shape.width * shape.budget)
    return min(steps, max(0, int(min(first - company, steps)))) or steps


def _idle_shares(lengths: IntArray, cost: CostModel, shape: Shape) -> FloatArray:
    """``[at most _MOST_EXAMINED]`` of a row that begins with a sample: the share of its time that it has to idle."""
    top = lengths[: _MOST_EXAMINED + shape.width - 1].astype(np.float64)
    if len(top) < shape.width:
        return np.zeros(0)
    alike = np.floor(0.98 * shape.budget / top)
    most = cost.linear * shape.budget + cost.quadratic * (alike * top**2 + (shape.budget - alike * top) ** 2)
    rows = np.lib.stride_tricks.sliding_window_view(most, shape.width)
    costs = positive_costs(lengths[: len(rows)], cost)
    shares: FloatArray = np.maximum(0.0, costs[:, None] - rows).sum(axis=1) / (costs * shape.width)
    return shares
