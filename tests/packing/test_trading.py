"""Rows trade samples: never against the budget, never at the cost of another row, never what must stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.trading import trade

WIDTH, BUDGET = 4, 1000


@st.composite
def packed_rows(draw):
    """Samples in bins of three rows: tokens falling, the bin of each, or -1, and which of them may change their row."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    tokens = -np.sort(-rng.integers(1, 900, draw(st.integers(1, 60))))
    bin_of, fill = np.full(len(tokens), -1), np.zeros(3 * WIDTH, dtype=np.int64)
    for item, size in enumerate(tokens.tolist()):
        fits = np.flatnonzero(fill + size <= BUDGET)
        if len(fits):
            bin_of[item] = rng.choice(fits)
            fill[bin_of[item]] += size
    return tokens, bin_of, rng.random(len(tokens)) < 0.8


def costs_of(tokens):
    return tokens + tokens.astype(float) ** 2 / 500


def tops(bin_of, costs):
    placed = bin_of >= 0
    return np.bincount(bin_of[placed], costs[placed], minlength=3 * WIDTH).reshape(3, WIDTH).max(axis=1)


@given(packed_rows())
def test_no_row_becomes_costlier_and_no_bin_exceeds_the_budget(packed):
    tokens, bin_of, free = packed
    before, costs = bin_of.copy(), costs_of(tokens)
    made = trade(bin_of, free, WIDTH, tokens, costs, 3 * WIDTH, BUDGET)
    assert (tops(bin_of, costs) <= tops(before, costs) + 1e-9).all()
    assert np.bincount(bin_of[bin_of >= 0], tokens[bin_of >= 0]).max(initial=0) <= BUDGET
    assert (made > 0) == (bin_of != before).any()


@given(packed_rows())
def test_samples_that_may_not_change_their_row_stay_and_those_without_a_bin_remain_so(packed):
    tokens, bin_of, free = packed
    before = bin_of.copy()
    trade(bin_of, free, WIDTH, tokens, costs_of(tokens), 3 * WIDTH, BUDGET)
    assert (bin_of[~free] == before[~free]).all()
    assert ((bin_of < 0) == (before < 0)).all()


def test_a_bin_that_stands_out_gives_its_sample_for_a_cheaper_one_of_a_bin_with_room():
    tokens = np.array([600, 560, 560, 500, 500, 500, 500, 500])
    bin_of = np.array([4, 0, 5, 1, 2, 3, 6, 7])  # the first row stands out by 560, the second by 600
    trade(bin_of, np.ones(8, dtype=bool), WIDTH, tokens, costs_of(tokens), 8, BUDGET)
    assert sorted(tokens[bin_of // WIDTH == 0].tolist()) == [500] * 4
    assert tops(bin_of, costs_of(tokens))[0] == pytest.approx(costs_of(np.array([500]))[0])
