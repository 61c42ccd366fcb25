"""Which samples wait for others like them."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.holding import Shape, held_back, steps_to_meet

COST = CostModel(linear=1.0, quadratic=0.01, constant=0.0)
SHAPE = Shape(rows=4, width=4, budget=100)


def held(lengths, must_go=()):
    may_wait = ~np.isin(np.arange(len(lengths)), must_go)
    return held_back(np.array(lengths), may_wait, COST, SHAPE).tolist()


def steps(lengths, due, before):
    return steps_to_meet(
        np.array(lengths), np.array(due), np.array(before, dtype=float), COST, SHAPE, steps=4, most_steps=5
    )


def test_short_samples_and_a_full_row_of_dear_ones_need_not_wait():
    assert held([10] * 40) == []
    assert held([100] * 4 + [10] * 40) == []


def test_a_dear_sample_waits_with_company():
    assert held([100] + [10] * 40) == [0, 1, 2]


def test_a_dear_sample_whose_time_has_come_takes_the_dearer_ones_along():
    assert held([100, 99] + [10] * 40, must_go=[1]) == []


def test_a_block_ends_before_the_first_dear_sample_would_be_drawn():
    assert steps([100] + [10] * 40, [-1] * 41, [2.7] + [0.0] * 40) == 2
    assert steps([10] * 41, [-1] * 41, [0.0] * 41) == 4


def test_a_block_ends_where_a_dear_sample_has_to_go_and_the_next_sees_as_far_as_it_may():
    assert steps([100] + [10] * 40, [3] + [-1] * 40, [0.0] * 41) == 3
    assert steps([100] + [10] * 40, [0] + [-1] * 40, [0.0] * 41) == 5
    assert steps([100] + [10] * 40, [8] + [-1] * 40, [0.0] * 41) == 4
