"""Cost models from measurements and from dimensions."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flowtrain_lightning.packing import CostModel, PackingError
from flowtrain_lightning.packing.fit import AdaptiveCost, Observation, cost_from_flops, fit_cost, predict

TRUE = CostModel(linear=2e-5, quadratic=1e-9, constant=0.004)


def observations(cost, count=60, noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        lengths = np.minimum(generator.lognormal(6, 1.2, generator.integers(1, 40)), 16_000).astype(np.int64) + 1
        found.append(Observation.of(lengths, cost.of_set(lengths) * (1 + noise * generator.standard_normal())))
    return found


def coefficients(cost):
    return [cost.linear, cost.quadratic, cost.constant]


def test_exact_times_give_the_coefficients_back():
    assert coefficients(fit_cost(observations(TRUE))) == pytest.approx(coefficients(TRUE), rel=1e-4)


def test_noise_of_two_percent_leaves_predictions_within_four():
    found = fit_cost(observations(TRUE, noise=0.02))
    errors = [predict(found, item) / item.seconds - 1 for item in observations(TRUE, seed=1)]
    assert np.abs(errors).max() < 0.04


def test_hiccups_of_the_machine_do_not_count():
    found = observations(TRUE, noise=0.01)
    for number in range(0, 60, 10):
        found[number] = Observation(found[number].tokens, found[number].squares, 20 * found[number].seconds)
    errors = [predict(fit_cost(found), item) / item.seconds - 1 for item in observations(TRUE, seed=1)]
    assert np.abs(errors).max() < 0.03


def test_coefficients_are_never_negative():
    falling = [Observation(100.0 * n, 1e4 * n, 1.0 / n) for n in range(1, 10)]
    assert min(coefficients(fit_cost(falling))) >= 0


@pytest.mark.parametrize(
    ("found", "words"),
    [([Observation(1, 1, 1)] * 2, "2 observations cannot fit"), ([Observation(1, 1, 0)] * 3, "a time above 0")],
)
def test_what_fits_nothing_is_refused(found, words):
    with pytest.raises(PackingError, match=words):
        fit_cost(found)


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


def test_a_machine_that_slows_down_is_followed_within_twenty_steps():
    adaptive = AdaptiveCost(TRUE)
    for step in range(60):
        slower = 1.0 if step < 20 else 1.6
        machine = CostModel(TRUE.linear * slower, TRUE.quadratic * slower**2, TRUE.constant)
        adaptive.end_step(step, observations(machine, count=8, noise=0.01, seed=step))
        if step == 40:
            assert adaptive.error < 0.05
    assert adaptive.error < 0.03
    assert adaptive.at(0) == TRUE


def test_a_steady_machine_changes_nothing_and_every_change_is_recorded_for_a_replay():
    adaptive = AdaptiveCost(TRUE)
    used = []
    for step in range(30):
        used.append(adaptive.cost)
        machine = TRUE if step < 10 else CostModel(3 * TRUE.linear, TRUE.quadratic, TRUE.constant)
        adaptive.end_step(step, observations(machine, count=4, seed=step))
    assert used[:11] == [TRUE] * 11
    assert [adaptive.at(step) for step in range(30)] == used


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
