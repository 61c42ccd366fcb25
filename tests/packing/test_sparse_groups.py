"""Balance groups of few samples: like with like, then swaps between groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.load_balancing import rebalance
from flowtrain_lightning.packing.sparse_groups import match_groups, swap_between_groups
from tests.packing.sizes import falling

BUDGET = 1000
SIZE = 4
COST = CostModel(linear=1.0, quadratic=1 / 1500, constant=0.0)


def matched(lengths, groups, size):
    tokens = falling(lengths)
    costs = COST.of_each(tokens)
    bin_of = match_groups(tokens, costs, groups, size, BUDGET)
    rebalance(bin_of, tokens, costs, groups, size, BUDGET)
    packed = bin_of >= 0
    return bin_of, np.bincount(bin_of[packed], costs[packed], minlength=groups * size).reshape(groups, size)


@settings(deadline=None)
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 4))
def test_no_bin_exceeds_the_budget_and_a_sample_that_fits_nowhere_is_named(lengths, groups, size):
    bin_of, _ = matched(lengths, groups, size)
    assert bin_of.max() < groups * size
    assert np.bincount(bin_of[bin_of >= 0], falling(lengths)[bin_of >= 0], minlength=1).max() <= BUDGET


def test_like_is_matched_with_like_and_short_samples_make_up_the_difference():
    _, loads = matched([800] * 4 + [450] * 8 + [140, 130, 140, 130, 90, 90, 90, 90], groups=2, size=4)
    assert (loads.max(axis=1) / loads.mean(axis=1) < 1.03).all()


def test_samples_of_no_kind_share_a_bin_that_costs_as_much_as_its_group():
    _, loads = matched([800] * 7 + [300, 290, 260], groups=1, size=8)
    assert loads.max() / loads.mean() < 1.04


@st.composite
def packed_groups(draw):
    """Samples in bins of three groups: tokens falling, the bin of each, or -1, and which may change their group."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    tokens = -np.sort(-rng.integers(1, 900, draw(st.integers(1, 60))))
    bin_of, fill = np.full(len(tokens), -1), np.zeros(3 * SIZE, dtype=np.int64)
    for item, size in enumerate(tokens.tolist()):
        fits = np.flatnonzero(fill + size <= BUDGET)
        if len(fits):
            bin_of[item] = rng.choice(fits)
            fill[bin_of[item]] += size
    return tokens, bin_of, rng.random(len(tokens)) < 0.8


def costs_of(tokens):
    return tokens + tokens.astype(float) ** 2 / 500


def costliest(bin_of, costs):
    packed = bin_of >= 0
    return np.bincount(bin_of[packed], costs[packed], minlength=3 * SIZE).reshape(3, SIZE).max(axis=1)


@given(packed_groups())
def test_swaps_make_no_group_costlier_and_exceed_no_budget(packed):
    tokens, bin_of, free = packed
    before, costs = bin_of.copy(), costs_of(tokens)
    swaps = swap_between_groups(bin_of, free, tokens, costs, 3, SIZE, BUDGET)
    assert (costliest(bin_of, costs) <= costliest(before, costs) + 1e-9).all()
    assert np.bincount(bin_of[bin_of >= 0], tokens[bin_of >= 0]).max(initial=0) <= BUDGET
    assert (swaps > 0) == (bin_of != before).any()


@given(packed_groups())
def test_swaps_leave_samples_that_must_stay_and_those_without_a_bin(packed):
    tokens, bin_of, free = packed
    before = bin_of.copy()
    swap_between_groups(bin_of, free, tokens, costs_of(tokens), 3, SIZE, BUDGET)
    assert (bin_of[~free] == before[~free]).all()
    assert ((bin_of < 0) == (before < 0)).all()


def test_a_bin_that_stands_out_swaps_its_sample_for_a_cheaper_one():
    tokens = np.array([600, 560, 560, 500, 500, 500, 500, 500])
    bin_of = np.array([4, 0, 5, 1, 2, 3, 6, 7])  # the first group stands out by 560, the second by 600
    swap_between_groups(bin_of, np.ones(8, dtype=bool), tokens, costs_of(tokens), 2, SIZE, BUDGET)
    assert sorted(tokens[bin_of // SIZE == 0].tolist()) == [500] * 4
    assert costliest(bin_of, costs_of(tokens))[0] == pytest.approx(costs_of(np.array([500]))[0])
