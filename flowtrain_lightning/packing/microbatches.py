"""The samples of one step to microbatches: as few as fit, equal in number on all ranks, alike in cost.

Microbatches that run together on all ranks stand at one *position*; they are numbered ``position * ranks + rank``.
"""

from __future__ import annotations

import itertools

import numpy as np

from flowtrain_lightning.packing.bin_packing import (
    MOST_SEARCHED,
    best_fit,
    branch_and_bound,
    longest_processing_time,
)
from flowtrain_lightning.packing.cost_model import CostModel
from flowtrain_lightning.packing.dense_groups import fill_groups
from flowtrain_lightning.packing.load_balancing import rebalance
from flowtrain_lightning.packing.sparse_groups import match_groups
from flowtrain_lightning.packing.step_plan import Batches, FloatArray, IntArray, SyncEvery

_FEW = 12
"""Samples per microbatch below which several algorithms are tried, as none is good for all."""
_MOST_MATCHED = 2_000
"""Samples of a step above which it takes too long to weigh every short one against every bin."""
_USABLE = 0.997
"""Share of the budgets of all its microbatches that a rank gets at most: fuller, its samples may not fit them."""
_SHORTFALL = 1e-3
"""Share of idle time above which one more microbatch per rank is tried, where ranks synchronise once a step."""
_RANK_TOLERANCE = 1e-7
"""The costliest rank may stay above the mean by this share of it if ranks synchronise once a step."""


def pack_microbatches(
    tokens: IntArray, *, ranks: int, token_budget: int, cost: CostModel, sync_every: SyncEvery = "microbatch"
) -> Batches:
    """Pack samples into microbatches and deal these to the backbone ranks.

    With ``microbatch`` the microbatches at one position are alike in cost on all ranks, with ``step`` the ranks'
    totals are. Ties are broken by index, so the answer depends on the arguments alone.

    Args:
        tokens: ``[samples]`` tokens of each sample, none above ``token_budget``.
        ranks: backbone ranks.
        token_budget: the most tokens of one microbatch.
        cost: what a packed set of sequences costs the backbone.
        sync_every: how often ranks wait for each other.

    Returns:
        ``[rank][position]`` -> sample numbers, ascending; empty arrays where there are fewer samples than
        microbatches. Without samples every rank has one empty microbatch.
    """
    order = np.argsort(-tokens, kind="stable")
    costs = cost.weight_of_each(tokens[order])
    bin_of, positions = pack_sorted(tokens[order], costs, ranks, token_budget, sync_every, cost.constant)
    found = np.empty(len(tokens), dtype=np.int64)
    found[order] = bin_of
    return as_microbatches(found, positions, ranks)


def as_microbatches(bin_of: IntArray, positions: int, ranks: int) -> Batches:
    """``[samples]`` microbatches, ``position * ranks + rank``, as ``[rank][position]`` -> sample numbers, ascending."""
    by_bin = np.argsort(bin_of, kind="stable")
    cuts = np.searchsorted(bin_of[by_bin], np.arange(positions * ranks + 1)).tolist()
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
        sync_every: how often ranks wait for each other.
        constant: what one more microbatch costs.

    Returns:
        ``[samples]`` the microbatch of each, ``position * ranks + rank``, and the number of positions.
    """
    fitted, opened = best_fit(tokens, budget, len(tokens))
    positions = max(1, -(-opened // ranks))
    if len(tokens) == 0 or (ranks == 1 and opened == 1):
        return fitted, positions
    if sync_every == "step":
        return _balance_ranks(tokens, costs, fitted, positions, ranks, budget, constant)
    if positions == 1 and opened == len(tokens):
        return fitted, 1
    candidates = _candidates(tokens, costs, fitted, positions, ranks, budget)
    times = [_synchronised_time(bin_of, costs, positions, ranks) for bin_of in candidates]
    best = candidates[int(np.argmin(times))]
    if len(tokens) <= MOST_SEARCHED:
        branch_and_bound(best, tokens, costs, positions, ranks, budget, True)
    return balance_totals(best, costs, positions, ranks), positions


def arrange(
    tokens: IntArray,
    costs: FloatArray,
    bin_of: IntArray,
    *,
    microbatches: int,
    group_size: int,
    ranks: int,
    budget: int,
    sync_every: SyncEvery,
) -> tuple[IntArray, int]:
    """Deal a step's microbatches, made in balance groups, to the ranks of a layout.

    Samples may change their microbatch, but none enters or leaves the step. Where the ranks do not divide the
    microbatches, the samples are packed again, in a few more microbatches.

    Args:
        tokens: ``[samples]`` of the step.
        costs: ``[samples]`` cost of each.
        bin_of: ``[samples]`` the microbatch of each, ``group * group_size + slot``.
        microbatches: of the step, over all ranks.
        group_size: microbatches of a balance group.
        ranks: backbone ranks of this layout.
        budget: the most tokens of a microbatch.
        sync_every: how often ranks wait for each other.

    Returns:
        ``[samples]`` the microbatch of each, ``position * ranks + rank``, and the number of positions.
    """
    order = np.argsort(-tokens, kind="stable")
    arranged = np.empty_like(bin_of)
    if microbatches % ranks:
        arranged[order], positions = pack_sorted(tokens[order], costs[order], ranks, budget, sync_every)
        return arranged, positions
    positions = microbatches // ranks
    tokens, costs, found = tokens[order], costs[order], bin_of[order]
    if ranks != group_size:
        found = sort_into_groups(found, costs, positions, ranks)
        if sync_every == "microbatch":
            rebalance(found, tokens, costs, positions, ranks, budget)
    found = balance_totals(found, costs, positions, ranks)
    if sync_every == "step":
        other = deal_to_ranks(tokens, costs, positions, ranks, budget)
        if other is not None and _longest_rank(other, costs, ranks) < _longest_rank(found, costs, ranks):
            found = other
    arranged[order] = found
    return arranged, positions


def sort_into_groups(bin_of: IntArray, costs: FloatArray, groups: int, group_size: int) -> IntArray:
    """Number bins anew so that the costliest ``group_size`` ones are group 0, and so on.

    Args:
        bin_of: ``[samples]`` the bin of each.
        costs: ``[samples]`` what each costs.
        groups: how many.
        group_size: bins of a group.

    Returns:
        ``[samples]`` the new number of each one's bin.
    """
    loads = np.bincount(bin_of, costs, minlength=groups * group_size)
    new_number = np.empty(groups * group_size, dtype=np.int64)
    new_number[np.argsort(-loads, kind="stable")] = np.arange(groups * group_size)
    return new_number[bin_of]


def balance_totals(bin_of: IntArray, costs: FloatArray, positions: int, ranks: int) -> IntArray:
    """Permute ranks inside positions, the most uneven position first, so that the ranks' totals are alike as well.

    Args:
        bin_of: ``[samples]`` the microbatch of each, ``position * ranks + rank``.
        costs: ``[samples]`` what each costs.
        positions: microbatches of a rank.
        ranks: of the role.

    Returns:
        ``[samples]`` the microbatch of each afterwards.
    """
    loads = np.bincount(bin_of, costs, minlength=positions * ranks).reshape(positions, ranks)
    totals = np.zeros(ranks)
    new_number = np.empty((positions, ranks), dtype=np.int64)
    for position in np.argsort(loads.min(axis=1) - loads.max(axis=1), kind="stable").tolist():
        costliest_first = np.argsort(-loads[position], kind="stable")
        lightest_first = np.argsort(totals, kind="stable")
        new_number[position, costliest_first] = position * ranks + lightest_first
        totals[new_number[position] - position * ranks] += loads[position]
    return new_number.ravel()[bin_of]


def _candidates(
    tokens: IntArray, costs: FloatArray, fitted: IntArray, positions: int, ranks: int, budget: int
) -> list[IntArray]:
    """Packs a step whose ranks synchronise at every microbatch by different algorithms, each rebalanced."""
    bins = positions * ranks
    found = [fill_groups(tokens, costs, positions, ranks, budget)]
    if found[0].min() < 0:
        found.clear()
    if len(tokens) < _FEW * bins or not found:
        found.append(sort_into_groups(fitted, costs, positions, ranks))
        if len(tokens) < min(_FEW * bins, _MOST_MATCHED):
            matched = match_groups(tokens, costs, positions, ranks, budget)
            if matched.min() >= 0:
                found.append(matched)
        dealt = longest_processing_time(tokens, costs, bins, budget)
        if dealt.min() >= 0:
            found.append(sort_into_groups(dealt, costs, positions, ranks))
    for bin_of in found:
        rebalance(bin_of, tokens, costs, positions, ranks, budget)
    return found


def _synchronised_time(bin_of: IntArray, costs: FloatArray, positions: int, ranks: int) -> float:
    return float(np.bincount(bin_of, costs, minlength=positions * ranks).reshape(positions, ranks).max(axis=1).sum())


def _balance_ranks(
    tokens: IntArray, costs: FloatArray, fitted: IntArray, positions: int, ranks: int, budget: int, constant: float
) -> tuple[IntArray, int]:
    """Equal totals first: samples to ranks, then each rank's samples to its microbatches."""
    least = max(costs.sum() / ranks, costs[0])
    answers: list[tuple[float, IntArray, int]] = []
    for count in range(positions, positions + 3):
        bin_of = deal_to_ranks(tokens, costs, count, ranks, budget)
        if bin_of is None:
            continue
        if len(tokens) <= MOST_SEARCHED:
            branch_and_bound(bin_of, tokens, costs, count, ranks, budget, False)
        longest = _longest_rank(bin_of, costs, ranks)
        answers.append((longest + constant * count, bin_of, count))
        if longest <= least * (1 + _SHORTFALL):
            break
    if not answers:
        bin_of = balance_totals(sort_into_groups(fitted, costs, positions, ranks), costs, positions, ranks)
        answers.append((0.0, bin_of, positions))
    _, best, count = min(answers, key=lambda answer: answer[0])
    return best, count


def _longest_rank(bin_of: IntArray, costs: FloatArray, ranks: int) -> float:
    return float(np.bincount(bin_of % ranks, costs, minlength=ranks).max())


def deal_to_ranks(tokens: IntArray, costs: FloatArray, positions: int, ranks: int, budget: int) -> IntArray | None:
    """Samples to ranks, alike in total cost, and to microbatches of each rank; None where a rank's do not fit.

    Args:
        tokens: ``[samples]`` falling.
        costs: ``[samples]`` of each.
        positions: microbatches of each rank.
        ranks: backbone ranks.
        budget: the most tokens of a microbatch.
    """
    capacity = int(_USABLE * positions * budget)
    rank_of = longest_processing_time(tokens, costs, ranks, capacity)
    if rank_of.min() < 0:
        return None
    rebalance(rank_of, tokens, costs, 1, ranks, capacity, _RANK_TOLERANCE)
    bin_of = np.empty(len(tokens), dtype=np.int64)
    for rank in range(ranks):
        own = np.flatnonzero(rank_of == rank)
        if len(own) == 0:
            continue
        position = fill_groups(tokens[own], costs[own], 1, positions, budget)
        if position.min() < 0:
            position, _ = best_fit(tokens[own], budget, positions)
        if position.min() < 0:
            return None
        bin_of[own] = position * ranks + rank
    return bin_of
