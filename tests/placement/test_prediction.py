"""How long a step takes on an allocation, by hand."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.placement.prediction import Processors, predict, reduction_seconds
from flowtrain_lightning.profiling import Reduction
from tests.packing.sizes import make_sizes
from tests.placement.profiles import make_profile

SIZES = make_sizes((9, [1]), (9, [1]))
"""Two samples of 10 tokens with 4 patches each."""
ALONE = Processors(((0, 1),), 2.0)


def array(*numbers):
    return np.array(numbers, dtype=np.int64)


SEPARATE = StepPlan(array(0, 1), SIZES, ((array(0), array(1)),), ((array(0), array(1)),))
COLOCATED = StepPlan(array(0, 1), SIZES, ((array(0),), (array(1),)), ((array(0),), (array(1),)))
APART, TOGETHER = default_allocation(2, "separate"), default_allocation(2, "colocated")


def seconds(plan, allocation, profile, processors=ALONE):
    return predict([plan], allocation, profile, processors, 4).seconds


def test_colocated_ranks_do_one_thing_after_another():
    assert seconds(COLOCATED, TOGETHER, make_profile(1.0, 1.0)) == 10 + 4


def test_separate_ranks_wait_for_the_first_features_and_the_last_gradients():
    # First forward (a quarter of 4), both microbatches, then the last encoder batch's backward.
    assert seconds(SEPARATE, APART, make_profile(1.0, 1.0)) == 1 + 20 + 3


def test_where_the_encoder_does_the_most_the_backbone_waits():
    found = predict([SEPARATE], APART, make_profile(10.0, 1.0), ALONE, 4)
    assert found.seconds == 80  # two batches of 40 s; one's forward hides the other's microbatch
    assert found.idle == {"encoder": 0.0, "backbone": 0.75}
    assert found.samples_per_second == 2 / 80


def test_a_frozen_encoder_works_ahead_and_only_its_forward_counts():
    profile = make_profile(5.0, 1.0, trains=False)
    assert seconds(SEPARATE, APART, profile) == 2 * 20  # its cost is the forward's alone
    assert seconds(SEPARATE, APART, make_profile(2.0, 1.0, trains=False)) == 2 * 10


def test_each_rank_ends_with_the_optimizers_and_reductions_of_its_roles():
    profile = make_profile(1.0, 1.0, optimizer=2.0, reduction=5.0)
    assert seconds(COLOCATED, TOGETHER, profile) == 14 + 2 * (2 + 5)
    assert seconds(SEPARATE, APART, profile) == 24 + 2


def test_more_ranks_reduce_as_a_ring_does():
    measured = Reduction(2, constant=1.0, seconds_per_byte=2.0)
    assert reduction_seconds(measured, 10, 1) == 0
    assert reduction_seconds(None, 10, 4) == 0
    assert reduction_seconds(measured, 10, 2) == 1 + 20
    assert reduction_seconds(measured, 10, 4) == 3 + 10 * 2.0 * 1.5
    assert reduction_seconds(measured, 0, 4) == 0


def test_ranks_that_share_a_processor_take_at_least_the_time_of_all_their_work():
    crowded = Processors(((0, 1),), 1.0)
    assert seconds(COLOCATED, TOGETHER, make_profile(1.0, 1.0), processors=crowded) == 28
    assert seconds(SEPARATE, APART, make_profile(1.0, 1.0), processors=crowded) == 28


def test_ranks_on_devices_of_their_own_do_not_share():
    apart = Processors(((0,), (1,)), 1.0)
    assert seconds(COLOCATED, TOGETHER, make_profile(1.0, 1.0), processors=apart) == 14
