"""Bins of a group made alike in cost: by moves and swaps, and by partitioning two of them anew."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing.bin_packing import best_fit
from flowtrain_lightning.packing.load_balancing import rebalance, two_way_partition
from tests.packing.sizes import falling

BUDGET = 100


def loads(bin_of, costs, groups, size):
    packed = bin_of >= 0
    return np.bincount(bin_of[packed], costs[packed], minlength=groups * size).reshape(groups, size)


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=80), st.integers(1, 3), st.integers(1, 5))
def test_no_group_gets_costlier_and_samples_stay_in_their_group_and_budget(lengths, groups, size):
    tokens = falling(lengths)
    costs = tokens + tokens**2 / 150
    before, _ = best_fit(tokens, BUDGET, groups * size)
    after = before.copy()
    rebalance(after, tokens, costs, groups, size, BUDGET)
    packed = before >= 0
    assert ((after >= 0) == packed).all()
    assert (after[packed] // size == before[packed] // size).all()
    assert np.bincount(after[packed], tokens[packed]).max() <= BUDGET
    assert (
        loads(after, costs, groups, size).max(axis=1) <= loads(before, costs, groups, size).max(axis=1) + 1e-9
    ).all()


def test_many_samples_come_to_cost_the_same_in_all_bins_of_a_group():
    tokens = falling(np.random.default_rng(0).integers(5, 50, 200).tolist())
    costs = tokens.astype(float)
    bin_of = np.arange(200) * 8 // 200  # the longest samples are all in the first bins
    rebalance(bin_of, tokens, costs, 2, 4, 10_000)
    found = loads(bin_of, costs, 2, 4)
    assert (found.max(axis=1) / found.mean(axis=1) < 1.005).all()


def partitioned(ours, theirs, budget):
    """Tokens of both bins afterwards; samples cost what they have tokens."""
    tokens = falling(ours + theirs)
    left = ours.copy()
    mine = []
    for number, length in enumerate(tokens.tolist()):
        if length in left:
            left.remove(length)
            mine.append(number)
    first = np.array(mine, dtype=np.int64)
    second = np.setdiff1d(np.arange(len(tokens)), first)
    fill = np.array([sum(ours), sum(theirs)])
    gap = float(sum(ours) - sum(theirs))
    changed = two_way_partition(first, second, tokens, tokens.astype(float), fill, budget, gap)
    ours_after = int(tokens[np.setxor1d(first, changed).astype(np.int64)].sum())
    return ours_after, int(tokens.sum()) - ours_after


def test_what_no_single_swap_can_balance_is_partitioned_anew():
    assert sorted(partitioned([9, 9], [7, 6, 5], 20)) == [18, 18]


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.lists(st.integers(1, 30), max_size=5))
def test_of_few_samples_no_partition_is_better(ours, theirs):
    if sum(ours) <= sum(theirs):
        return
    both = np.array(ours + theirs)
    sides = (np.array(side, dtype=bool) for side in product((0, 1), repeat=len(both)))
    best = min(max(int(both[side].sum()), int(both[~side].sum())) for side in sides)
    assert max(partitioned(ours, theirs, budget=sum(ours))) == pytest.approx(best)
