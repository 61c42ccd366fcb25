"""Interleaved stages: each stage does all of its passes once, in an order in which none waits for what comes later."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.policies.virtual_stages import virtual_stage_orders


def words(order) -> str:
    return " ".join(f"{each.kind[0]}{each.chunk}.{each.position}" for each in order)


def test_groups_of_as_many_microbatches_as_stages_go_through_one_chunk_after_another():
    first, last = virtual_stage_orders(4, 2, 2)
    assert words(first) == "f0.0 f0.1 f1.0 f1.1 f0.2 b1.0 f0.3 b1.1 f1.2 b0.0 f1.3 b0.1 b1.2 b1.3 b0.2 b0.3"
    assert words(last) == "f0.0 f0.1 f1.0 b1.0 f1.1 b1.1 f0.2 b0.0 f0.3 b0.1 f1.2 b1.2 f1.3 b1.3 b0.2 b0.3"


@given(st.integers(0, 13), st.integers(2, 5), st.integers(2, 4))
def test_no_number_of_microbatches_blocks(positions, stages, virtual):
    orders = virtual_stage_orders(positions, stages, virtual)
    assert all(len({*order}) == len(order) == 2 * positions * virtual for order in orders)
    left, done, last = [list(order) for order in orders], set(), stages * virtual - 1
    while any(left):
        went = False
        for stage, order in enumerate(left):
            while order:
                kind, chunk, position = order[0]
                number = chunk * stages + stage
                before = kind == "forward" and number == 0
                needed = (kind, number - 1 if kind == "forward" else number + 1, position)
                if kind == "backward" and number == last:
                    needed = ("forward", number, position)
                if not before and needed not in done:
                    break
                done.add((kind, number, position))
                order.pop(0)
                went = True
        assert went, left
