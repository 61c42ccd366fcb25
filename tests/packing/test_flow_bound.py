"""The least time that a step can take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.flow_bound import least_step_time
from flowtrain_lightning.packing.order import rows_time


def test_four_alike_rows_and_an_encoder_with_as_much_to_do_leave_a_twelfth():
    # Media in the first row delay the beginning by a third of their cost; media that are not in it leave the encoder
    # without gradients to work on. A quarter of them in the first row is the best.
    costs = np.ones(40)
    encoder = np.where(np.arange(40) < 30, 0.0, 4.0)
    assert least_step_time(np.full((4, 1), 10.0), costs, encoder, encoder_ranks=1) == pytest.approx(40 * (1 + 1 / 12))


def test_eight_rows_with_text_enough_for_two_leave_nothing():
    costs = np.ones(80)
    encoder = np.where(np.arange(80) < 40, 0.0, 2.0)
    assert least_step_time(np.full((8, 1), 10.0), costs, encoder, encoder_ranks=1) == pytest.approx(80)


def test_without_text_the_first_forward_and_the_last_backward_are_waited_for():
    costs, encoder = np.ones(80), np.full(80, 0.1)
    # Each row has 1 of media: a third of it before the first begins, two thirds after the last ends.
    least = least_step_time(np.full((8, 1), 10.0), costs, encoder, encoder_ranks=1)
    assert least == pytest.approx(81)


def test_without_media_a_step_takes_what_its_rows_take():
    rows = np.array([[3.0, 4.0], [2.0, 1.0]])
    assert least_step_time(rows, np.full(10, 1.0), np.zeros(10), encoder_ranks=2) == pytest.approx(6)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 1), st.floats(0, 2)), min_size=1, max_size=40),
    st.integers(1, 3),
)
def test_no_step_is_shorter_than_its_bound(samples, encoder_ranks):
    row_of, costs, share = (np.array(column) for column in zip(*samples, strict=True))
    row_of = np.unique(row_of, return_inverse=True)[1]
    encoder = costs * share
    rows = np.bincount(row_of, costs)
    media = np.bincount(row_of, encoder) / encoder_ranks
    least = least_step_time(rows[:, None], costs, encoder, encoder_ranks=encoder_ranks)
    assert least <= rows_time(np.arange(len(rows)), rows[:, None], media) * (1 + 1e-6)
