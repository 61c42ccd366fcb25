"""The simulated step."""

from __future__ import annotations

import pytest

from flowtrain_lightning.packing.evaluator import EncoderWork, step_time


def test_without_media_a_step_takes_what_the_backbone_takes():
    found = step_time([[1.0, 2.0], [2.0, 1.0]], [[]], meet=False)
    assert (found.makespan, found.work, found.flow_gap) == (3.0, 3.0, 0.0)


def test_ranks_that_meet_wait_for_the_slowest_at_every_microbatch():
    assert step_time([[1.0, 2.0], [2.0, 1.0]], [[]], meet=True).makespan == 4.0


def test_a_microbatch_waits_for_its_features_and_an_encoder_for_their_gradients():
    batch = EncoderWork(1.0, 2.0, ((0, 0),))
    assert step_time([[4.0]], [[batch]], meet=True).makespan == 1.0 + 4.0 + 2.0


def test_text_first_and_last_hides_the_encoder():
    batch = EncoderWork(1.0, 2.0, ((0, 1),))
    assert step_time([[2.0, 2.0, 2.0]], [[batch]], meet=True).flow_gap == 0.0


def test_a_frozen_encoder_has_no_backward():
    batches = [EncoderWork(1.0, 0.0, ((0, position),)) for position in range(3)]
    assert step_time([[2.0, 2.0, 2.0]], [batches], meet=True).makespan == 1.0 + 6.0


def test_few_kept_activations_hold_later_forwards_back():
    batches = [EncoderWork(1.0, 1.0, ((0, position),)) for position in range(2)]
    free = step_time([[3.0, 3.0]], [batches], meet=True)
    bound = step_time([[3.0, 3.0]], [batches], meet=True, kept=1)
    assert free.makespan == 1 + 3 + 3 + 1
    assert bound.makespan == 1 + 3 + 1 + 1 + 3 + 1


def test_a_colocated_rank_does_one_thing_at_a_time():
    batch = EncoderWork(1.0, 2.0, ((0, 0),))
    found = step_time([[4.0, 1.0]], [[batch]], meet=True, colocated=True)
    assert found.makespan == found.work == 8.0


def test_an_order_that_the_limit_blocks_is_refused():
    batches = [EncoderWork(1.0, 1.0, ((0, 0),)), EncoderWork(1.0, 1.0, ((0, 0),))]
    with pytest.raises(ValueError, match="kept=1 keeps too few"):
        step_time([[1.0]], [batches], meet=True, kept=1)
