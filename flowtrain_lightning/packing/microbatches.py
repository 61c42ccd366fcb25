"""The samples of one step to microbatches: as few as fit, equal in number on all ranks, alike in cost."""

from __future__ import annotations

import itertools
from typing import Literal, get_args

import numpy as np

from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.evening import even_out
from flowtrain_lightning.packing.fitting import best_fit, cheapest_first
from flowtrain_lightning.packing.grouping import group_rows
from flowtrain_lightning.packing.plan import FloatArray, IntArray
from flowtrain_lightning.packing.rows import fill_rows
from flowtrain_lightning.packing.tiny import MOST_SAMPLES, search

SyncEvery = Literal["microbatch", "step"]
"""``microbatch``: ranks meet at every microbatch (FSDP, tensor and pipeline parallelism); ``step``: once a step."""

SYNC_EVERY: tuple[str, ...] = get_args(SyncEvery)

_FEW = 12
"""Samples per microbatch below which several rules are tried, as none is good for all."""
_MOST_GROUPED = 2_000
"""Samples of a step above which it takes too long to weigh every short one against every bin."""
_ROOM = 0.997
"""Share of the budgets of all its microbatches that a rank is dealt at most: fuller, its samples may not fit them."""
_SHORTFALL = 1e-3
"""Share of idle time above which one more microbatch per rank is tried, where ranks meet once a step."""


def pack_microbatches(
    tokens: IntArray, *, ranks: int, token_budget: int, cost: CostModel, sync_every: SyncEvery = "microbatch"
) -> tuple[tuple[IntArray, ...], ...]:
    """Pack samples into microbatches and deal these to the backbone ranks.

    With ``microbatch`` the microbatches at one position are alike in cost on all ranks, with ``step`` the ranks'
    totals are. Ties are broken by index, so the answer depends on the arguments alone.

    Args:
        tokens: ``[samples]`` tokens of each sample, none above ``token_budget``.
        ranks: backbone ranks.
        token_budget: the most tokens of one microbatch.
        cost: what a packed set of sequences costs the backbone.
        sync_every: when ranks wait for each other.

    Returns:
        ``[rank][position]`` -> sample numbers, ascending; empty arrays where there are fewer samples than
        microbatches. Without samples every rank has one empty microbatch.
    """
    order = np.argsort(-tokens, kind="stable")
    costs = positive_costs(tokens[order], cost)
    bin_of, rows = pack_sorted(tokens[order], costs, ranks, token_budget, sync_every, cost.constant)
    found = np.empty(len(tokens), dtype=np.int64)
    found[order] = bin_of
    return as_microbatches(found, rows, ranks)


def positive_costs(tokens: IntArray, cost: CostModel) -> FloatArray:
    """``[samples]`` what each sample costs; its tokens where the model counts nothing but a constant."""
    if cost.linear == 0 and cost.quadratic == 0:
        return tokens.astype(np.float64)
    return cost.of_each(tokens)


def as_microbatches(bin_of: IntArray, rows: int, ranks: int) -> tuple[tuple[IntArray, ...], ...]:
    """``[samples]`` bins, ``position * ranks + rank``, as ``[rank][position]`` -> sample numbers, ascending."""
    by_bin = np.argsort(bin_of, kind="stable")
    cuts = np.searchsorted(bin_of[by_bin], np.arange(rows * ranks + 1)).tolist()
    members = [by_bin[start:end] for start, end in itertools.pairwise(cuts)]
    return tuple(tuple(members[rank::ranks]) for rank in range(ranks))


def pack_sorted(
    tokens: IntArray, costs: FloatArray, ranks: int, budget: int, sync_every: SyncEvery, constant: float = 0.0
) -> tuple[IntArray, int]:
    """Pack samples that come longest first.

    Args:
        tokens: ``[samples]`` falling, none above ``budget``.
        costs: ``[samples]`` of each.
        ranks: backbone ranks.
        budget: the most tokens of a microbatch.
        sync_every: when ranks wait for each other.
        constant: what one more microbatch costs.

    Returns:
        ``[samples]`` the bin, ``position * ranks + rank``, and the number of positions.
    """
    fitted, opened = best_fit(tokens, budget, len(tokens))
    rows = max(1, -(-opened // ranks))
    if len(tokens) == 0 or (ranks == 1 and opened == 1):
        return fitted, rows
    if sync_every == "step":
        return _by_rank(tokens, costs, fitted, rows, ranks, budget, constant)
    if rows == 1 and opened == len(tokens):
        return fitted, 1
    answers = _answers(tokens, costs, fitted, rows, ranks, budget)
    values = [_time(answer, costs, rows, ranks) for answer in answers]
    best = answers[int(np.argmin(values))]
    if len(tokens) <= MOST_SAMPLES:
        search(best, tokens, costs, rows, ranks, budget, True)
    return level_ranks(best, costs, rows, ranks), rows


def group_alike(bin_of: IntArray, costs: FloatArray, rows: int, width: int) -> IntArray:
    """Number bins anew so that the costliest ``width`` ones are row 0, and so on."""
    loads = np.bincount(bin_of, costs, minlength=rows * width)
    place = np.empty(rows * width, dtype=np.int64)
    place[np.argsort(-loads, kind="stable")] = np.arange(rows * width)
    return place[bin_of]


def level_ranks(bin_of: IntArray, costs: FloatArray, rows: int, ranks: int) -> IntArray:
    """Change columns inside rows, the most uneven row first, so that the ranks' totals are alike as well."""
    loads = np.bincount(bin_of, costs, minlength=rows * ranks).reshape(rows, ranks)
    totals = np.zeros(ranks)
    place = np.empty((rows, ranks), dtype=np.int64)
    for row in np.argsort(loads.min(axis=1) - loads.max(axis=1), kind="stable").tolist():
        columns = np.argsort(-loads[row], kind="stable")
        place[row, columns] = row * ranks + np.argsort(totals, kind="stable")
        totals[place[row] - row * ranks] += loads[row]
    return place.ravel()[bin_of]


def _answers(
    tokens: IntArray, costs: FloatArray, fitted: IntArray, rows: int, ranks: int, budget: int
) -> list[IntArray]:
    """What different rules make of a step, each evened out row by row."""
    bins = rows * ranks
    found = [fill_rows(tokens, costs, costs[-1] / tokens[-1], rows, ranks, budget)]
    if found[0].min() < 0:
        found.clear()
    if len(tokens) < _FEW * bins or not found:
        found.append(group_alike(fitted, costs, rows, ranks))
        if len(tokens) < min(_FEW * bins, _MOST_GROUPED):
            grouped = group_rows(tokens, costs, rows, ranks, budget)
            if grouped.min() >= 0:
                found.append(grouped)
        dealt = cheapest_first(tokens, costs, bins, budget)
        if dealt.min() >= 0:
            found.append(group_alike(dealt, costs, rows, ranks))
    row_of = np.arange(bins) // ranks
    for bin_of in found:
        even_out(bin_of, row_of, rows, tokens, costs, bins, budget)
    return found


def _time(bin_of: IntArray, costs: FloatArray, rows: int, ranks: int) -> float:
    return float(np.bincount(bin_of, costs, minlength=rows * ranks).reshape(rows, ranks).max(axis=1).sum())


def _by_rank(
    tokens: IntArray, costs: FloatArray, fitted: IntArray, rows: int, ranks: int, budget: int, constant: float
) -> tuple[IntArray, int]:
    """Equal totals first: samples to ranks, then each rank's samples to its microbatches."""
    least = max(costs.sum() / ranks, costs[0])
    answers: list[tuple[float, IntArray, int]] = []
    for positions in range(rows, rows + 3):
        bin_of = deal_to_ranks(tokens, costs, positions, ranks, budget)
        if bin_of is None:
            continue
        if len(tokens) <= MOST_SAMPLES:
            search(bin_of, tokens, costs, positions, ranks, budget, False)
        highest = np.bincount(bin_of % ranks, costs, minlength=ranks).max()
        answers.append((highest + constant * positions, bin_of, positions))
        if highest <= least * (1 + _SHORTFALL):
            break
    if not answers:
        bin_of = level_ranks(group_alike(fitted, costs, rows, ranks), costs, rows, ranks)
        answers.append((0.0, bin_of, rows))
    _, best, positions = min(answers, key=lambda answer: answer[0])
    return best, positions


def deal_to_ranks(tokens: IntArray, costs: FloatArray, rows: int, ranks: int, budget: int) -> IntArray | None:
    """Samples to ranks, alike in total cost, and to ``rows`` bins of each rank; None where a rank lacks the room."""
    room = int(_ROOM * rows * budget)
    rank_of = cheapest_first(tokens, costs, ranks, room)
    if rank_of.min() < 0:
        return None
    even_out(rank_of, np.zeros(ranks, dtype=np.int64), 1, tokens, costs, ranks, room, 1e-7)
    bin_of = np.empty(len(tokens), dtype=np.int64)
    for rank in range(ranks):
        own = np.flatnonzero(rank_of == rank)
        if len(own) == 0:
            continue
        position = fill_rows(tokens[own], costs[own], costs[own][-1] / tokens[own][-1], 1, rows, budget)
        if position.min() < 0:
            position, _ = best_fit(tokens[own], budget, rows)
        if position.min() < 0:
            return None
        bin_of[own] = position * ranks + rank
    return bin_of
