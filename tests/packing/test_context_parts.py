"""Parts into which a dear sample would be split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing import CostModel, PackingError
from flowtrain_lightning.packing.context_parts import context_parts

COST = CostModel(linear=1.0, quadratic=0.01, constant=0.0)


def test_a_sample_no_dearer_than_a_mean_microbatch_stays_whole():
    assert context_parts(np.array([50, 50, 50, 50]), COST, microbatches=4).tolist() == [1, 1, 1, 1]


def test_a_dear_sample_is_split_until_no_part_is_dearer_than_a_mean_microbatch():
    tokens = np.array([100, 10, 10, 10])  # costs 200, 11, 11, 11
    assert context_parts(tokens, COST, microbatches=2).tolist() == [2, 1, 1, 1]
    assert context_parts(tokens, COST, microbatches=8).tolist() == [8, 1, 1, 1]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 16))
def test_the_parts_are_the_fewest_of_a_power_of_two_that_suffice(tokens, microbatches):
    costs = COST.of_each(np.array(tokens))
    mean = costs.sum() / microbatches
    parts = context_parts(np.array(tokens), COST, microbatches=microbatches)
    assert (costs / parts <= mean * (1 + 1e-9)).all()
    assert ((parts == 1) | (costs / (parts / 2) > mean * (1 - 1e-9))).all()


def test_steps_without_microbatches_are_refused():
    with pytest.raises(PackingError, match="A step has 0 microbatches; it must have at least 1"):
        context_parts(np.array([1]), COST, microbatches=0)


def test_a_step_without_samples_has_nothing_to_split():
    assert context_parts(np.array([], dtype=np.int64), COST, microbatches=4).tolist() == []
