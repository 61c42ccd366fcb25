"""The cost of a packed set of sequences: from coefficients, from dimensions, from measured times."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flowtrain_lightning.packing import CostModel, PackingError
from flowtrain_lightning.packing.cost_model import AdaptiveCost, Observation, cost_from_flops, fit_cost, predict

TRUE = CostModel(linear=2e-5, quadratic=1e-9, constant=0.004)


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


@pytest.mark.parametrize(
    ("cost", "weights"),
    [(CostModel(2.0, 0.5, 7.0), [10.5, 16.0]), (CostModel(0.0, 0.0, 7.0), [3.0, 4.0])],
)
def test_packing_balances_costs_or_tokens_where_only_forwards_cost(cost, weights):
    assert cost.weight_of_each(np.array([3, 4])).tolist() == weights


@pytest.mark.parametrize("name", ["linear", "quadratic", "constant"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_coefficient_that_is_no_cost_is_refused_by_name(name, value):
    coefficients = {"linear": 1.0, "quadratic": 1.0, "constant": 1.0, name: value}
    with pytest.raises(ValueError, match=f"The {name} coefficient of a cost model is {value}"):
        CostModel(**coefficients)


def test_a_decoder_of_seven_billion_weights_has_the_known_ratio_of_attention():
    cost = cost_from_flops(7e9, 28, 3584, flops_per_second=4e14)
    assert cost.quadratic / cost.linear == pytest.approx(1.4e-5, rel=0.05)


def test_window_attention_is_linear():
    cost = cost_from_flops(6e8, 32, 1280, flops_per_second=1e14, causal=False, window=64)
    assert cost.quadratic == 0
    assert cost.linear > 6 * 6e8 / 1e14


@pytest.mark.parametrize("name", ["parameters", "layers", "hidden", "flops_per_second"])
def test_dimensions_below_one_are_refused_by_name(name):
    given = {"parameters": 1e9, "layers": 2, "hidden": 8, "flops_per_second": 1e12, name: 0}
    with pytest.raises(PackingError, match=f"{name} is 0; it must be above 0"):
        cost_from_flops(**given)


def observations(cost, count=60, noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        lengths = np.minimum(generator.lognormal(6, 1.2, generator.integers(1, 40)), 16_000).astype(np.int64) + 1
        found.append(Observation.of(lengths, cost.of_set(lengths) * (1 + noise * generator.standard_normal())))
    return found


def worst_error(fitted, held_out):
    return max(abs(predict(fitted, item) / item.seconds - 1) for item in held_out)


def coefficients(cost):
    return [cost.linear, cost.quadratic, cost.constant]


def test_exact_times_give_the_coefficients_back():
    assert coefficients(fit_cost(observations(TRUE))) == pytest.approx(coefficients(TRUE), rel=1e-4)


def test_noise_of_two_percent_leaves_predictions_within_four():
    assert worst_error(fit_cost(observations(TRUE, noise=0.02)), observations(TRUE, seed=1)) < 0.04


def test_hiccups_of_the_machine_do_not_count():
    found = observations(TRUE, noise=0.01)
    for number in range(0, 60, 10):
        found[number] = Observation(found[number].tokens, found[number].squares, 20 * found[number].seconds)
    assert worst_error(fit_cost(found), observations(TRUE, seed=1)) < 0.03


def test_coefficients_that_would_be_negative_are_zero():
    falling = [Observation(100.0 * n, 1e4 * n, 1.0 / n) for n in range(1, 10)]
    assert coefficients(fit_cost(falling)) == [0, 0, pytest.approx(0.15, rel=0.1)]


@pytest.mark.parametrize(
    ("found", "words"),
    [([Observation(1, 1, 1)] * 2, "2 observations cannot fit"), ([Observation(1, 1, 0)] * 3, "a time above 0")],
)
def test_what_fits_nothing_is_refused(found, words):
    with pytest.raises(PackingError, match=words):
        fit_cost(found)


def test_a_machine_that_slows_down_is_followed_within_twenty_steps():
    adaptive = AdaptiveCost(TRUE)
    for step in range(60):
        slower = 1.0 if step < 20 else 1.6
        machine = CostModel(TRUE.linear * slower, TRUE.quadratic * slower**2, TRUE.constant)
        adaptive.end_step(step, observations(machine, count=8, noise=0.01, seed=step))
        if step == 40:
            assert adaptive.error < 0.05
    assert adaptive.error < 0.03


def test_a_steady_machine_changes_nothing_and_every_change_is_recorded():
    adaptive = AdaptiveCost(TRUE)
    used = []
    for step in range(30):
        used.append(adaptive.cost)
        machine = TRUE if step < 10 else CostModel(3 * TRUE.linear, TRUE.quadratic, TRUE.constant)
        adaptive.end_step(step, observations(machine, count=4, seed=step))
    assert used[:11] == [TRUE] * 11
    replayed = [[cost for since, cost in adaptive.changes if since <= step][-1] for step in range(30)]
    assert replayed == used


def test_a_saved_state_goes_on_alike():
    whole, resumed = AdaptiveCost(TRUE), AdaptiveCost(CostModel(1.0, 1.0, 1.0))
    machines = [TRUE if step < 4 else CostModel(3 * TRUE.linear, TRUE.quadratic, TRUE.constant) for step in range(9)]
    for step, machine in enumerate(machines):
        if step == 6:
            resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        seen = observations(machine, count=4, seed=step)
        for adaptive in (whole, resumed)[: 1 + (step >= 6)]:
            adaptive.end_step(step, seen)
    assert (resumed.cost, resumed.error) == (whole.cost, whole.error)
    assert resumed.changes[1:] == [change for change in whole.changes if change[0] > 6]
