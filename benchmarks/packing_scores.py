"""What the bins of a packer are worth: the metrics of this project's plans, for anybody's bins."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.packing_data import Lengths
from benchmarks.packing_signatures import Bins
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.evaluation import encoder_idle, measure

RANKS, POSITIONS = 8, 4
"""Backbone ranks, and microbatches of each in a step."""
COST = CostModel(1.0, 1 / 24_576, 0.0)


def level(step: Bins, costs: np.ndarray[Any, Any]) -> Bins:
    """The bins of every position dealt to the ranks so that their totals are alike too."""
    totals = np.zeros(RANKS)
    dealt: Bins = []
    for start in range(0, len(step), RANKS):
        bins = sorted(step[start : start + RANKS], key=lambda members: -costs[np.array(members, dtype=int)].sum())
        of_rank: Bins = [[] for _ in range(RANKS)]
        for rank, members in zip(np.argsort(totals, kind="stable").tolist(), bins, strict=True):
            of_rank[rank] = members
            totals[rank] += costs[np.array(members, dtype=int)].sum()
        dealt += of_rank
    return dealt


def score(steps: list[Bins], lengths: Lengths, budget: int) -> dict[str, Any]:
    """The metrics of bins; the media items of a bin are encoded by the rank that reads it."""
    shape = (len(steps), POSITIONS, RANKS)
    quantities = (COST.of_each(lengths.tokens), lengths.encoder_cost, lengths.tokens, np.ones(len(lengths.tokens)))
    grids = [
        np.array([[values[np.array(b, dtype=int)].sum() for b in step] for step in steps]).reshape(shape)
        for values in quantities
    ]
    figures: dict[str, Any] = dict(measure(grids[0], grids[1], grids[2], grids[3], budget).as_dict())
    return figures | {"encoder_idle": encoder_idle(grids[1].sum(axis=1)), "max_delay": 0, "steps": len(steps)}


def longest_wait(steps: list[Bins], count: int) -> int:
    """Steps that a sample waited at most, drawn when the first sample behind it in the stream was used, or itself."""
    step_of = np.full(count, len(steps))
    for number, step in enumerate(steps):
        step_of[[item for members in step for item in members]] = number
    drawn = np.minimum.accumulate(step_of[::-1])[::-1]
    return int((step_of - drawn)[step_of < len(steps)].max(initial=0))


def random_order(lengths: Lengths, budget: int) -> float:
    """``mixcv`` where steps are cut from the stream as it comes."""
    ends = np.cumsum(lengths.tokens)
    cuts = np.searchsorted(ends, np.arange(0, ends[-1], 0.985 * RANKS * POSITIONS * budget))
    counts = np.diff(cuts)
    return float(counts.std() / counts.mean())
