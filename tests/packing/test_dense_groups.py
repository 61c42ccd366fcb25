"""Balance groups of many samples, filled one after another."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.dense_groups import fill_groups
from tests.packing.sizes import falling

BUDGET = 1000
COST = CostModel(linear=1.0, quadratic=1 / 1500, constant=0.0)


def filled(lengths, groups, size):
    tokens = falling(lengths)
    return tokens, fill_groups(tokens, COST.of_each(tokens), groups, size, BUDGET)


@settings(deadline=None)
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=80), st.integers(1, 4), st.integers(1, 4))
def test_no_bin_exceeds_the_budget_and_a_sample_that_fits_nowhere_is_named(lengths, groups, size):
    tokens, bin_of = filled(lengths, groups, size)
    assert bin_of.max() < groups * size
    assert np.bincount(bin_of[bin_of >= 0], tokens[bin_of >= 0], minlength=1).max() <= BUDGET


def test_groups_are_dense_and_their_bins_cost_the_same():
    lengths = np.minimum(np.random.default_rng(0).lognormal(3.5, 1.0, 2000).astype(int) + 1, BUDGET)
    groups, size = 8, 4
    chosen = lengths[: int(np.searchsorted(np.cumsum(lengths), 0.98 * groups * size * BUDGET))]
    tokens, bin_of = filled(chosen.tolist(), groups, size)
    assert (bin_of < 0).sum() <= 5
    packed = bin_of >= 0
    loads = np.bincount(bin_of[packed], COST.of_each(tokens)[packed], minlength=groups * size).reshape(groups, size)
    assert 1 - loads.mean(axis=1).sum() / loads.max(axis=1).sum() < 0.01


def test_long_samples_share_a_group_with_their_like():
    tokens, bin_of = filled([900] * 4 + [20] * 150, groups=2, size=4)
    assert set((bin_of[tokens == 900] // 4).tolist()) == {0}


def test_samples_without_tokens_go_somewhere():
    _, bin_of = filled([5, 3, 0, 0], groups=1, size=2)
    assert bin_of.min() >= 0
