"""Rows of few samples."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.evening import even_out
from flowtrain_lightning.packing.fitting import best_fit
from flowtrain_lightning.packing.grouping import fitting_count, group_rows

BUDGET = 100
COST = CostModel(linear=1.0, quadratic=1 / 150, constant=0.0)


def falling(lengths):
    return np.sort(np.array(lengths, dtype=np.int64))[::-1].copy()


def rows_of(lengths, rows, width):
    tokens = falling(lengths)
    costs = COST.of_each(tokens)
    bin_of = group_rows(tokens, costs, rows, width, BUDGET)
    even_out(bin_of, np.arange(rows * width) // width, rows, tokens, costs, rows * width, BUDGET)
    loads = np.bincount(bin_of[bin_of >= 0], costs[bin_of >= 0], minlength=rows * width).reshape(rows, width)
    return bin_of, loads


@settings(deadline=None)
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 4))
def test_no_bin_exceeds_the_budget_and_a_sample_without_room_is_named(lengths, rows, width):
    bin_of, _ = rows_of(lengths, rows, width)
    assert bin_of.max() < rows * width
    assert np.bincount(bin_of[bin_of >= 0], falling(lengths)[bin_of >= 0], minlength=1).max() <= BUDGET


@settings(deadline=None)
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=60), st.integers(1, 12))
def test_as_many_samples_are_counted_as_best_fit_brings_into_the_bins(lengths, bins):
    tokens = np.array(lengths, dtype=np.int64)
    count = fitting_count(tokens, bins, BUDGET)
    _, opened = best_fit(falling(lengths[:count]), BUDGET, len(lengths))
    assert opened <= bins
    assert count == len(lengths) or falling(lengths[: count + 1]).sum() > (bins - 1) * BUDGET / 2


def test_like_meets_like_and_short_ones_make_up_the_difference():
    _, loads = rows_of([80] * 4 + [45] * 8 + [14, 13, 14, 13, 9, 9, 9, 9], rows=2, width=4)
    assert (loads.max(axis=1) / loads.mean(axis=1) < 1.03).all()


def test_samples_that_fit_no_kind_share_a_bin_that_costs_as_much_as_its_row():
    _, loads = rows_of([80] * 7 + [30, 29, 26], rows=1, width=8)
    assert loads.max() / loads.mean() < 1.04
