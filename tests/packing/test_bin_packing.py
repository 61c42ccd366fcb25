"""Best fit, longest processing time, and branch and bound."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing.bin_packing import best_fit, branch_and_bound, fitting_count, longest_processing_time
from tests.packing.sizes import falling

BUDGET = 100
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=60)


def fit(lengths, most=1000):
    bin_of, opened = best_fit(falling(lengths), BUDGET, most)
    return bin_of.tolist(), opened


@given(LENGTHS)
def test_best_fit_keeps_the_budget_and_packs_every_sample(lengths):
    bin_of, opened = fit(lengths)
    assert set(bin_of) == set(range(opened))
    fill = [0] * opened
    for chosen, length in zip(bin_of, sorted(lengths, reverse=True), strict=True):
        fill[chosen] += length
    assert max(fill, default=0) <= BUDGET


@given(LENGTHS)
def test_best_fit_never_leaves_two_bins_that_fit_into_one(lengths):
    bin_of, opened = fit(lengths)
    fill = np.sort(np.bincount(bin_of, sorted(lengths, reverse=True), minlength=opened)) if lengths else []
    assert opened < 2 or fill[0] + fill[1] > BUDGET


def test_best_fit_takes_the_fullest_bin_with_space():
    assert fit([70, 60, 30, 40]) == ([0, 1, 1, 0], 2)


def test_best_fit_opens_no_more_bins_than_it_may():
    assert fit([70, 60, 30], most=1) == ([0, -1, 0], 1)


@settings(deadline=None)
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=60), st.integers(1, 12))
def test_as_many_samples_are_counted_as_best_fit_brings_into_the_bins(lengths, bins):
    count = fitting_count(np.array(lengths, dtype=np.int64), bins, BUDGET)
    assert fit(lengths[:count])[1] <= bins
    assert count == len(lengths) or falling(lengths[: count + 1]).sum() > (bins - 1) * BUDGET / 2


def test_the_costliest_goes_first_to_the_cheapest_bin_with_space():
    tokens = np.array([90, 50, 20, 15], dtype=np.int64)
    costs = np.array([5.0, 9.0, 2.0, 2.0])
    order = np.argsort(-costs, kind="stable")
    assert longest_processing_time(tokens[order], costs[order], 2, BUDGET).tolist() == [0, 1, 0, 0]


def test_longest_processing_time_gives_up_where_a_sample_fits_nowhere():
    tokens = np.array([60, 50, 40, 30, 20], dtype=np.int64)
    assert longest_processing_time(tokens, tokens.astype(float), 2, BUDGET).tolist() == [0, 1, 1, 0, -1]


def step_cost(bin_of, costs, positions, ranks, per_position):
    grid = np.bincount(bin_of, costs, minlength=positions * ranks).reshape(positions, ranks)
    return grid.max(axis=1).sum() if per_position else grid.sum(axis=0).max()


@pytest.mark.parametrize("per_position", [True, False])
@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=5), st.integers(1, 2), st.integers(1, 3))
def test_branch_and_bound_finds_the_best_answer_of_a_few_samples(per_position, lengths, positions, ranks):
    tokens, bins = falling(lengths), positions * ranks
    costs = tokens + tokens**2 / 50
    found, _ = best_fit(tokens, BUDGET, bins)
    if found.min() < 0:
        return
    branch_and_bound(found, tokens, costs, positions, ranks, BUDGET, per_position)
    every = (np.array(answer) for answer in product(range(bins), repeat=len(lengths)))
    allowed = [answer for answer in every if np.bincount(answer, tokens, minlength=bins).max() <= BUDGET]
    best = min(step_cost(answer, costs, positions, ranks, per_position) for answer in allowed)
    assert np.bincount(found, tokens).max() <= BUDGET
    assert step_cost(found, costs, positions, ranks, per_position) == pytest.approx(best)
