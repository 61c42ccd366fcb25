"""How short a step can be at best, given what its microbatches cost and how poor in media they can be made."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from flowtrain_lightning.packing.evaluator import FORWARD_SHARE
from flowtrain_lightning.packing.plan import FloatArray, IntArray


def least_step_time(rows: FloatArray, costs: FloatArray, encoder: FloatArray, *, encoder_ranks: int) -> float:
    """A lower bound on the time of a step whose ranks meet at every microbatch and whose encoder trains.

    Media may be cut at will and are dealt evenly to the encoder ranks. What holds nevertheless: a position begins when
    the forwards for all positions up to it are done; the backwards for all positions from one on come after its end;
    and any positions together read no less media than the samples poorest in media that cost as much.

    Args:
        rows: ``[positions, ranks]`` backbone cost of each microbatch, in order.
        costs: ``[samples]`` backbone cost of each sample of the step.
        encoder: ``[samples]`` encoder cost of each, forward and backward, in the same unit.
        encoder_ranks: ranks that share the encoder cost.

    Returns:
        the time in the unit of cost.
    """
    count, longest, totals = len(rows), rows.max(axis=1), rows.sum(axis=1)
    media = float(encoder.sum()) / encoder_ranks
    poorest = np.argsort(encoder / np.maximum(costs, 1e-300), kind="stable")
    cost_up_to = np.concatenate([[0.0], np.cumsum(costs[poorest])])
    media_up_to = np.concatenate([[0.0], np.cumsum(encoder[poorest])]) / encoder_ranks
    # Unknown are the beginning of each position, the media that each reads, and the end of the step.
    begin, reads, end = np.arange(count), count + np.arange(count), 2 * count
    lines: list[FloatArray] = []
    limits: list[float] = []

    def at_most(limit: float, *terms: tuple[IntArray | int, float]) -> None:
        line = np.zeros(2 * count + 1)
        for places, factor in terms:
            line[places] += factor
        lines.append(line)
        limits.append(limit)

    for position in range(count):
        at_most(0.0, (reads[: position + 1], FORWARD_SHARE), (int(begin[position]), -1.0))
        at_most(-longest[position], (int(begin[position]), 1.0), (reads[position:], 1 - FORWARD_SHARE), (end, -1.0))
        if position:
            at_most(-longest[position - 1], (int(begin[position - 1]), 1.0), (int(begin[position]), -1.0))
        for after in range(position, count + 1):
            outside = np.r_[:position, after:count]
            if len(outside):
                held = float(np.interp(totals[outside].sum(), cost_up_to, media_up_to))
                at_most(-held, (reads[outside], -1.0))
    answer = linprog(
        np.eye(2 * count + 1)[end],
        A_ub=np.array(lines),
        b_ub=np.array(limits),
        A_eq=[np.repeat([0.0, 1.0, 0.0], [count, count, 1])],
        b_eq=[media],
        method="highs",
    )
    return max(float(answer.fun), media) if answer.status == 0 else max(float(longest.sum()), media)
