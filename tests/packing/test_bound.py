"""Idle time that no plan can avoid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.bound import idle_bound, rank_bound
from flowtrain_lightning.packing.microbatches import pack_microbatches

COST = CostModel(linear=1.0, quadratic=0.01, constant=0.0)


def bound(tokens, step, reach=0, width=4):
    return idle_bound(np.array(tokens), np.array(step, dtype=float), COST, width=width, budget=100, reach=reach)


def test_short_samples_alone_need_not_idle():
    assert bound([5] * 100, [0] * 100) == 0


def test_a_dear_sample_alone_makes_its_row_wait():
    # One microbatch of 100 tokens costs 200; the three beside it, filled with samples of 10, cost 110 each.
    assert bound([100] + [10] * 100, [0] * 101) == pytest.approx(3 * 90 / (3 * 90 + 200 + 100 * 11), rel=0.02)


def test_dear_samples_that_can_meet_need_not_wait():
    tokens, step = [100, *[10] * 50] * 4, [number for number in range(4) for _ in range(51)]
    assert bound(tokens, step) > 0.1
    assert bound(tokens, step, reach=3) == 0


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 4))
def test_no_plan_is_better_than_the_bound(tokens, width):
    packed = pack_microbatches(np.array(tokens), ranks=width, token_budget=100, cost=COST)
    loads = np.array([[COST.of_set(np.array(tokens)[m]) for m in rank] for rank in packed])
    idle = 1 - loads.mean(axis=0).sum() / loads.max(axis=0).sum()
    assert bound(tokens, [0] * len(tokens), width=width) <= idle + 1e-9


def test_once_a_step_only_a_sample_dearer_than_a_rank_s_share_makes_others_wait():
    assert rank_bound([np.array([1.0] * 8)], 4) == 0
    assert rank_bound([np.array([5.0, 1.0, 1.0, 1.0])], 4) == pytest.approx(1 - 2 / 5)
