"""Best fit and cheapest first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.fitting import best_fit, cheapest_first

BUDGET = 100
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=60)


def fit(lengths, most=1000):
    bin_of, opened = best_fit(np.sort(np.array(lengths, dtype=np.int64))[::-1].copy(), BUDGET, most)
    return bin_of.tolist(), opened


@given(LENGTHS)
def test_best_fit_keeps_the_budget_and_places_every_sample(lengths):
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


def test_best_fit_takes_the_fullest_bin_with_room():
    assert fit([70, 60, 30, 40]) == ([0, 1, 1, 0], 2)


def test_best_fit_opens_no_more_bins_than_it_may():
    assert fit([70, 60, 30], most=1) == ([0, -1, 0], 1)


def test_cheapest_first_goes_by_cost_and_passes_over_bins_without_room():
    tokens = np.array([90, 50, 20, 15], dtype=np.int64)
    costs = np.array([5.0, 9.0, 2.0, 2.0])
    order = np.argsort(-costs, kind="stable")
    assert cheapest_first(tokens[order], costs[order], 2, BUDGET).tolist() == [0, 1, 0, 0]


def test_cheapest_first_gives_up_where_there_is_no_room_left():
    tokens = np.array([60, 50, 40, 30, 20], dtype=np.int64)
    assert cheapest_first(tokens, tokens.astype(float), 2, BUDGET).tolist() == [0, 1, 1, 0, -1]
