"""The figures of a packing."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.packing.metrics import encoder_idle, measure

COST = np.array([[[4.0, 2.0], [1.0, 3.0]], [[2.0, 2.0], [2.0, 2.0]]])


def figures(encoder=None, tokens=None, samples=None):
    return measure(
        COST,
        np.zeros_like(COST) if encoder is None else encoder,
        np.full_like(COST, 50) if tokens is None else tokens,
        np.full_like(COST, 3) if samples is None else samples,
        100,
    )


def test_ranks_that_meet_at_every_microbatch_wait_for_the_costliest_of_each_row():
    assert figures().idle_sync == pytest.approx(100 * (1 - 9 / (4 + 3 + 2 + 2)))


def test_ranks_that_meet_once_a_step_wait_for_the_costliest_total():
    assert figures().idle_acc == pytest.approx(100 * (1 - 9 / (5 + 4)))


def test_two_phases_each_wait():
    assert figures(encoder=COST).idle_two == pytest.approx(figures().idle_sync)
    assert figures(encoder=COST[:, :, ::-1]).idle_enc == pytest.approx(figures().idle_sync)


def test_spreads_are_means_over_steps_and_rows():
    assert figures().imb == pytest.approx((4 / 2.5 + 1) / 2)
    assert figures().row == pytest.approx((4 / 3 + 3 / 2 + 1 + 1) / 4)


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
