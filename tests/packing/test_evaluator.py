"""The simulated step."""

from __future__ import annotations

import pytest

from flowtrain_lightning.packing.evaluator import EncoderWork, Lanes, StepWork, run_time, step_time
from flowtrain_lightning.packing.playing import Stretch


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


def test_a_recomputed_batch_keeps_nothing_and_takes_its_forward_twice():
    batches = [EncoderWork(1.0, 1.0, ((0, 0),)), EncoderWork(1.0, 1.0, ((0, 0),), recomputed=True)]
    # Two forwards, the microbatch, a backward, and forward and backward of the second.
    assert step_time([[4.0]], [batches], meet=True, kept=1).makespan == 1 + 1 + 4 + 1 + (1 + 1)


def separate(**rules) -> Lanes:
    return Lanes(backbone=(0,), encoder=(1,), meet=False, **rules)


def test_the_backbone_goes_on_while_the_encoder_still_does_its_backward():
    step = StepWork([[2.0, 3.0]], [[EncoderWork(1.0, 2.0, ((0, 1),))]])
    # The second step begins with text at 5 s, the encoder at 7 s; its features are there at 8 s.
    assert run_time([step, step], separate()) == [5.0, 8.0 + 3.0]


def test_an_encoder_that_does_not_train_works_ahead_into_later_steps():
    step = StepWork([[3.0]], [[EncoderWork(1.0, 0.0, ((0, 0),))]])
    assert run_time([step] * 4, separate(ahead=8)) == [4.0, 7.0, 10.0, 13.0]
    assert run_time([step] * 4, separate(ahead=0)) == [4.0, 8.0, 12.0, 16.0]


def test_an_encoder_works_no_further_ahead_than_it_may():
    quick = StepWork([[1.0]], [[EncoderWork(4.0, 0.0, ((0, 0),))]])
    slow = StepWork([[10.0]], [[EncoderWork(1.0, 0.0, ((0, 0),))]])
    # At 1 s the third step's features could be begun at 2 s, but the first step ends at 11 s only.
    assert run_time([slow, slow, quick], separate(ahead=1)) == [11.0, 21.0, 22.0]
    assert run_time([slow, quick, quick], separate(ahead=1)) == [11.0, 12.0, 16.0]


def test_no_microbatch_begins_before_all_forwards_where_the_encoder_goes_first():
    step = StepWork([[1.0, 1.0]], [[EncoderWork(2.0, 1.0, ((0, 0),)), EncoderWork(2.0, 1.0, ((0, 1),))]])
    assert run_time([step], separate()) == [2 + 1 + 1 + 1]
    assert run_time([step], separate(encoder_first=True)) == [2 + 2 + 1 + 1]


def test_lanes_that_meet_are_seen_to_block_where_one_rank_waits_for_another():
    # Rank 0 enters its microbatch and waits there for rank 1, which waits for features that rank 0 would encode next.
    batches = [[EncoderWork(1.0, 0.0, ((1, 0),))], [EncoderWork(1.0, 0.0, ((1, 0),))]]
    with pytest.raises(ValueError, match="lanes on one rank wait"):
        step_time([[1.0], [1.0]], batches, meet=True, colocated=True)


def test_everything_that_is_computed_can_be_seen():
    step = StepWork([[2.0, 3.0]], [[EncoderWork(1.0, 2.0, ((0, 1),))]])
    stretches: list[Stretch] = []
    run_time([step, step], separate(), stretches)
    found = [(one.step, one.kind, one.rank, one.number, one.start, one.end) for one in stretches if one.step == 0]
    assert sorted(found) == [
        (0, "backward", 1, 0, 5.0, 7.0),
        (0, "forward", 1, 0, 0.0, 1.0),
        (0, "read", 0, 0, 0.0, 2.0),
        (0, "read", 0, 1, 2.0, 5.0),
    ]
    assert len(stretches) == 2 * len(found)
