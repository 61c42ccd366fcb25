"""The cost of a packed set of sequences."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.packing import CostModel


def test_the_cost_of_a_set_is_linear_plus_quadratic_plus_constant():
    cost = CostModel(linear=2.0, quadratic=0.5, constant=7.0)
    assert cost.of_set(np.array([3, 4])) == 2.0 * 7 + 0.5 * 25 + 7.0


def test_one_long_sequence_costs_more_than_two_halves():
    cost = CostModel(linear=1.0, quadratic=0.01, constant=0.0)
    assert cost.of_set(np.array([100])) > cost.of_set(np.array([50, 50]))


def test_an_empty_set_costs_the_constant():
    assert CostModel(linear=1.0, quadratic=1.0, constant=5.0).of_set(np.array([], dtype=np.int64)) == 5.0


def test_long_sequences_do_not_overflow():
    assert CostModel(linear=0.0, quadratic=1.0, constant=0.0).of_set(np.array([2**40])) == 2.0**80


@pytest.mark.parametrize("name", ["linear", "quadratic", "constant"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_coefficient_that_is_no_cost_is_refused_by_name(name, value):
    coefficients = {"linear": 1.0, "quadratic": 1.0, "constant": 1.0, name: value}
    with pytest.raises(ValueError, match=f"The {name} coefficient of a cost model is {value}"):
        CostModel(**coefficients)
