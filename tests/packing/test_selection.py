"""Which samples wait for others like them."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.sample_stream import StreamSettings
from flowtrain_lightning.packing.selection import deferred_samples, steps_for_outliers

SETTINGS = StreamSettings(
    token_budget=100, microbatches=16, balance_group=4, cost=CostModel(linear=1.0, quadratic=0.01, constant=0.0)
)


def deferred(lengths, must_go=()):
    may_wait = ~np.isin(np.arange(len(lengths)), must_go)
    return deferred_samples(np.array(lengths), may_wait, SETTINGS).tolist()


def steps(lengths, due, before):
    arrays = np.array(lengths), np.array(due), np.array(before, dtype=float)
    return steps_for_outliers(*arrays, SETTINGS, steps=4, most_steps=5)


def test_short_samples_and_a_full_group_of_outliers_need_not_wait():
    assert deferred([10] * 40) == []
    assert deferred([100] * 4 + [10] * 40) == []


def test_an_outlier_waits_with_company():
    assert deferred([100] + [10] * 40) == [0, 1, 2]


def test_an_outlier_whose_time_has_come_takes_the_costlier_ones_along():
    assert deferred([100, 99] + [10] * 40, must_go=[1]) == []


def test_a_block_ends_before_the_first_outlier_would_be_drawn():
    assert steps([100] + [10] * 40, [-1] * 41, [2.7] + [0.0] * 40) == 2
    assert steps([10] * 41, [-1] * 41, [0.0] * 41) == 4


def test_a_block_ends_where_an_outlier_has_to_go_and_the_next_sees_far():
    assert steps([100] + [10] * 40, [3] + [-1] * 40, [0.0] * 41) == 3
    assert steps([100] + [10] * 40, [0] + [-1] * 40, [0.0] * 41) == 5
    assert steps([100] + [10] * 40, [8] + [-1] * 40, [0.0] * 41) == 4
