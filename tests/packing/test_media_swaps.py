"""How much media each position should read, and swaps of samples until it does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.media_swaps import swap_for_media, wanted_media
from flowtrain_lightning.packing.simulator import closed_form_time


def test_equal_positions_want_their_media_in_the_middle_as_far_as_possible():
    cost, media = np.ones(8), np.full(8, 0.8)
    free = wanted_media(cost[:, None], media, np.zeros(8), np.full(8, np.inf))
    assert free.sum() == pytest.approx(media.sum())
    assert max(free[0], free[-1]) < 0.1
    bound = wanted_media(cost[:, None], media, np.full(8, 0.5), np.full(8, 1.0))
    assert bound.min() >= 0.5 - 1e-9
    assert bound.max() <= 1.0 + 1e-9


@given(st.lists(st.tuples(st.floats(0.5, 2), st.floats(0, 2)), min_size=1, max_size=6))
def test_wanted_media_never_make_a_step_longer(positions):
    cost, media = np.array(positions).T
    wanted = wanted_media(cost[:, None], media, np.zeros(len(cost)), np.full(len(cost), np.inf))
    order = np.arange(len(cost))
    assert closed_form_time(order, cost[:, None], wanted) <= closed_form_time(order, cost[:, None], media) * (1 + 1e-9)


def test_a_swap_never_overfills_a_microbatch():
    # The two texts that could be swapped for the picture are longer than it, and their microbatch is full.
    tokens = np.array([300, 100, 160, 160, 80])
    bin_of = np.array([0, 0, 1, 1, 1])
    encoder = np.array([300.0, 0.0, 0.0, 0.0, 0.0])
    swap_for_media(bin_of, np.array([0, 1]), np.array([1, 4, 2, 3, 0]), tokens, encoder, np.ones((2, 1)), 1, 400, 400)
    assert np.bincount(bin_of, tokens, minlength=2).max() <= 400
