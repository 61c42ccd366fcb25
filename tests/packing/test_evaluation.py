"""The figures of a packing."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.evaluation import encoder_idle, evaluate, measure
from flowtrain_lightning.packing.offline import OfflinePlan, OfflineSettings, PackedStep

COST = np.array([[[4.0, 2.0], [1.0, 3.0]], [[2.0, 2.0], [2.0, 2.0]]])


def figures(encoder=None, tokens=None, samples=None):
    return measure(
        COST,
        np.zeros_like(COST) if encoder is None else encoder,
        np.full_like(COST, 50) if tokens is None else tokens,
        np.full_like(COST, 3) if samples is None else samples,
        100,
    )


def test_ranks_that_synchronise_at_every_microbatch_wait_for_its_costliest():
    assert figures().idle_sync == pytest.approx(100 * (1 - 9 / (4 + 3 + 2 + 2)))


def test_ranks_that_synchronise_once_a_step_wait_for_the_costliest_total():
    assert figures().idle_acc == pytest.approx(100 * (1 - 9 / (5 + 4)))


def test_two_phases_each_wait():
    assert figures(encoder=COST).idle_two == pytest.approx(figures().idle_sync)
    assert figures(encoder=COST[:, :, ::-1]).idle_enc == pytest.approx(figures().idle_sync)


def test_spreads_are_means_over_steps_and_positions():
    assert figures().imb == pytest.approx((4 / 2.5 + 1) / 2)
    assert figures().imb_position == pytest.approx((4 / 3 + 3 / 2 + 1 + 1) / 4)


def test_padding_overflow_and_drift():
    tokens = np.full_like(COST, 50)
    tokens[0, 0, 0] = 110
    samples = np.array([[[1.0, 1.0], [1.0, 1.0]], [[3.0, 3.0], [3.0, 3.0]]])
    found = figures(tokens=tokens, samples=samples)
    assert found.pad == pytest.approx(100 * (1 - 57.5 / 100))
    assert found.over == pytest.approx(100 / 8)
    assert found.mixcv == pytest.approx(0.5)


def test_encoder_ranks_wait_once_a_step():
    assert encoder_idle(np.array([[1.0, 3.0], [2.0, 2.0]])) == pytest.approx(100 * (1 - 4 / 5))


def test_a_plan_is_evaluated_with_the_simulated_time_of_its_steps():
    # Two ranks of one microbatch each; the first reads a picture of 30, whose backward comes after the microbatch.
    step = PackedStep(np.array([0, 1]), np.array([0, 1]), 1, np.array([0, 0]), ((np.array([0]),),))
    settings = OfflineSettings(100, 2, CostModel(1.0, 0.0, 0.0), global_batch_size=2)
    plan = OfflinePlan((step,), np.array([2]), seconds=3e-6)
    found = evaluate(plan, np.array([60, 40, 50]), np.array([0, 1, 1, 1]), np.array([30.0]), settings)
    assert found["flow_gap"] == pytest.approx(100 * ((10 + 60 + 20) / 60 - 1))
    assert found["idle_sync"] == pytest.approx(100 * (1 - 50 / 60))
    assert found["pad"] == pytest.approx(50)
    assert (found["steps"], found["samples_left"], found["max_delay_seen"]) == (1, 1, 0)
    assert found["microseconds_per_sample"] == pytest.approx(1)
