"""The order of the microbatches within a step, and how much media each should read."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.evaluator import EncoderWork, step_time
from flowtrain_lightning.packing.order import fastest_order, flow_order, rows_time, wanted_media

POSITIONS = st.lists(st.tuples(st.floats(0.5, 2), st.floats(0, 2)), min_size=1, max_size=6)


def test_positions_poor_in_media_go_first_and_last():
    media = np.array([50, 0, 30, 10, 40])
    assert media[flow_order(media)].tolist() == [0, 30, 50, 40, 10]


@pytest.mark.parametrize(("media", "order"), [([], []), ([3], [0]), ([9, 1], [1, 0]), ([0, 0, 0], [0, 2, 1])])
def test_short_and_equal_steps_have_an_order_too(media, order):
    assert flow_order(np.array(media, dtype=np.int64)).tolist() == order


@given(st.lists(st.integers(0, 100), max_size=20))
def test_media_rise_to_one_summit_and_fall(media):
    order = flow_order(np.array(media, dtype=np.int64))
    assert sorted(order.tolist()) == list(range(len(media)))
    ordered = [media[position] for position in order]
    summit = ordered.index(max(ordered)) if ordered else 0
    assert ordered[: summit + 1] == sorted(ordered[: summit + 1])
    assert ordered[summit:] == sorted(ordered[summit:], reverse=True)


@given(POSITIONS)
def test_a_step_of_rows_takes_what_the_simulation_of_its_lanes_says(positions):
    cost, media = np.array(positions).T
    batches = [EncoderWork(m / 3, m * 2 / 3, ((0, p),)) for p, m in enumerate(media.tolist()) if m > 0]
    simulated = step_time([cost.tolist()], [batches], meet=True).makespan
    assert rows_time(np.arange(len(cost)), cost[:, None], media) == pytest.approx(simulated)


@given(st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0, 2)), min_size=1, max_size=6))
def test_lanes_that_do_not_meet_are_simulated_too(positions):
    *costs, media = np.array(positions).T
    readers = [((0, p), (1, p)) for p in range(len(media))]
    batches = [EncoderWork(m / 3, m * 2 / 3, readers[p]) for p, m in enumerate(media.tolist()) if m > 0]
    simulated = step_time([cost.tolist() for cost in costs], [batches], meet=False).makespan
    assert rows_time(np.arange(len(media)), np.stack(costs, axis=1), media) == pytest.approx(simulated)


@given(POSITIONS)
def test_the_fastest_order_is_near_the_best_of_all_and_never_slower_than_the_flow_order(positions):
    cost, media = np.array(positions).T
    order = fastest_order(cost[:, None], media)
    assert sorted(order.tolist()) == list(range(len(cost)))
    found = rows_time(order, cost[:, None], media)
    best = min(rows_time(np.array(other), cost[:, None], media) for other in permutations(range(len(cost))))
    assert found <= rows_time(flow_order(media), cost[:, None], media)
    assert found <= best * 1.02


def test_alike_rows_want_their_media_away_from_the_end_as_far_as_they_can_give_it():
    cost, media = np.ones(8), np.full(8, 0.8)
    free = wanted_media(cost[:, None], media, np.zeros(8), np.full(8, np.inf))
    assert free.sum() == pytest.approx(media.sum())
    assert max(free[0], free[-1]) < 0.1
    bound = wanted_media(cost[:, None], media, np.full(8, 0.5), np.full(8, 1.0))
    assert bound.min() >= 0.5 - 1e-9
    assert bound.max() <= 1.0 + 1e-9


@given(POSITIONS)
def test_wanted_media_never_make_a_step_longer(positions):
    cost, media = np.array(positions).T
    wanted = wanted_media(cost[:, None], media, np.zeros(len(cost)), np.full(len(cost), np.inf))
    order = np.arange(len(cost))
    assert rows_time(order, cost[:, None], wanted) <= rows_time(order, cost[:, None], media) * (1 + 1e-9)
