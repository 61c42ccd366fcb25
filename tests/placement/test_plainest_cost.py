"""Fitted cost models keep the terms that the times show, and no others."""

import numpy as np
import pytest

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation, fit_cost
from flowtrain_lightning.placement.module_profile import plainest_cost

TRUE = CostModel(linear=1e-4, quadratic=1e-7, constant=2e-3)
"""Attention is a tenth of the rest at 100 tokens."""


def observed(shortest, longest, seed, noise=0.02):
    """Sixteen sets of one to sixteen lengths, whose times are off by a few percent."""
    draw = np.random.default_rng(seed)
    sets = [draw.integers(shortest, longest + 1, count) for count in range(1, 17)]
    return [Observation.of(one, TRUE.of_set(one) * draw.normal(1, noise)) for one in sets]


@pytest.mark.parametrize("seed", range(8))
def test_lengths_that_are_nearly_alike_keep_a_linear_term(seed):
    cost = plainest_cost(observed(98, 102, seed))
    for length in (50, 100, 200):
        lengths = np.full(8, length)
        assert cost.of_set(lengths) == pytest.approx(TRUE.of_set(lengths), rel=0.15)


def test_without_that_the_linear_term_would_be_lost():
    lost = [fit_cost(observed(98, 102, seed)).linear < 0.5 * TRUE.linear for seed in range(8)]
    assert any(lost)


@pytest.mark.parametrize("seed", range(8))
def test_lengths_that_differ_show_what_attention_costs(seed):
    cost = plainest_cost(observed(20, 2000, seed, noise=0.01))
    for length in (100, 1000, 2000):
        lengths = np.full(4, length)
        assert cost.of_set(lengths) == pytest.approx(TRUE.of_set(lengths), rel=0.1)


def test_few_long_lengths_are_enough_to_show_it():
    sets = [np.full(count, 50) for count in range(2, 14)] + [np.full(1, 2000), np.full(1, 1500), np.full(2, 900)]
    cost = plainest_cost([Observation.of(one, TRUE.of_set(one)) for one in sets])
    assert cost.quadratic == pytest.approx(TRUE.quadratic, rel=0.01)


def test_what_has_no_work_costs_nothing():
    assert plainest_cost(()) == CostModel(0.0, 0.0, 0.0)
