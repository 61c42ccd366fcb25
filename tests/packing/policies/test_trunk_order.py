"""The trunk's order: backward at once, or as soon as what was made of a microbatch has been answered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.policies.trunk_order import TrunkOrder, in_order


@pytest.mark.parametrize(
    ("read", "in_flight", "order"),
    [
        ((), 2, "f0 b0 f1 b1 f2 b2 f3 b3"),
        ((0, 1, 2, 3), 2, "f0 f1 b0 f2 b1 f3 b2 b3"),
        ((0, 1, 2, 3), 1, "f0 b0 f1 b1 f2 b2 f3 b3"),
        ((0, 3), 2, "f0 f1 b0 b1 f2 b2 f3 b3"),
        ((1,), 2, "f0 b0 f1 f2 b1 b2 f3 b3"),
    ],
)
def test_a_microbatch_stays_open_while_others_read_it(read, in_flight, order):
    assert " ".join(f"{kind[0]}{number}" for kind, number in in_order(4, read, in_flight)) == order


@given(st.integers(0, 12), st.sets(st.integers(0, 11)), st.integers(1, 3))
def test_backwards_never_fall_and_no_more_are_open_than_may(positions, read, in_flight):
    passes = list(in_order(positions, read, in_flight))
    for kind in ("forward", "backward"):
        assert [number for done, number in passes if done == kind] == list(range(positions))
    opened = 0
    for kind, _ in passes:
        opened += 1 if kind == "forward" else -1
        assert opened <= in_flight


def test_gradients_of_what_is_read_come_after_the_forwards_before_its_backward():
    order = TrunkOrder((), answered=(1, 2, 2))
    assert [order.answered_after(until) for until in (-1, 0, 1, 2)] == [-1, 1, 2, 2]
