"""How much room in the pool a plan needs."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.pool import Reservation, entry_nbytes
from flowtrain_lightning.runtime.room import FeatureSpec, feature_order, gradient_order, least_room, step_room
from tests.packing.sizes import make_sizes, plan_of, sizes_strategy

SPEC = FeatureSpec(((8,), (2, 3)), (torch.float32, torch.float64))


def test_a_spec_tells_what_a_row_of_features_is():
    features = (torch.zeros(7, 8), torch.zeros(7, 2, 3, dtype=torch.float64))
    assert FeatureSpec.of(features) == SPEC


def test_an_entry_takes_the_room_of_all_its_tensors():
    assert SPEC.room(5) == entry_nbytes([5 * 8 * 4, 5 * 2 * 3 * 8])


def test_features_of_a_batch_are_held_together_and_gradients_one_by_one():
    plan = plan_of(make_sizes((10, [30, 20]), (80, [20]), (70, [5])))
    batches = [[0], [1, 2]]
    assert feature_order(plan, SPEC, batches) == {
        number: Reservation(SPEC.room(plan.entries[number].rows), last) for number, last in ((0, 0), (1, 2), (2, 2))
    }
    assert gradient_order(plan, SPEC, [2, 0]) == {
        number: Reservation(SPEC.room(plan.entries[number].rows), place) for place, number in enumerate([2, 0])
    }


def test_the_least_room_is_that_of_the_largest_encoder_batch():
    plan = plan_of(make_sizes((10, [30]), (80, [20]), (70, [5])))
    assert [len(batch) for batch in plan.encoder_batches[0]] == [1, 1, 1]
    assert least_room(plan, SPEC) == SPEC.room(30)


def test_room_for_the_whole_step_is_that_of_the_busiest_encoder_rank():
    plan = plan_of(make_sizes((10, [30]), (80, [20]), (70, [5])))
    assert step_room(plan, SPEC) == sum(map(SPEC.room, (30, 20, 5)))


def test_a_step_without_media_needs_no_room():
    plan = plan_of(make_sizes((10, []), (80, [])))
    assert least_room(plan, SPEC) == step_room(plan, SPEC) == 0


@given(sizes_strategy(), st.integers(1, 4), st.integers(1, 4))
def test_a_step_never_needs_less_than_its_largest_batch_nor_more_than_all_of_it(sizes, encoders, backbones):
    plan = plan_of(sizes, encoders, backbones)
    everything = sum(SPEC.room(entry.rows) for entry in plan.entries)
    assert least_room(plan, SPEC) <= step_room(plan, SPEC) <= everything
