"""The order of the microbatches within a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.order import flow_order


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
