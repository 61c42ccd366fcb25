"""What a step's microbatches and encoder batches took is told with what they held."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.data import RankShard, StepBatch
from flowtrain_lightning.packing import SampleSizes, StepPlan
from flowtrain_lightning.runtime.step import Step
from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE, STALL, Span, Timeline
from flowtrain_lightning.runtime.times import measured


def step_of(part: RankShard, index: int = 20) -> Step:
    tokens = np.array([3, 4, 5, 6])
    sizes = SampleSizes(tokens, tokens, np.array([0, 1, 2, 3, 4]), np.ones(4, dtype=np.int64), np.array([8, 4, 2, 1]))
    numbers = [np.array([number]) for number in range(4)]
    microbatches = ((np.array([0, 1]), numbers[2]), (numbers[3], np.array([], dtype=np.int64)))
    plan = StepPlan(np.arange(4), sizes, microbatches, ((np.array([0, 3]), np.array([1, 2])),))
    return Step(StepBatch(plan, part, (), (), 0, index), "train", index, trains=True)


def timeline_of(*spans: tuple[str, str, str, int, int, float]) -> Timeline:
    """Lane, kind, stage, step, number and seconds of each span."""
    timeline = Timeline()
    for lane, kind, stage, step, number, seconds in spans:
        timeline.add(Span(lane, kind, "", stage, step, number, 10.0, 10.0 + seconds))
    return timeline


def test_each_microbatch_is_told_with_its_tokens_and_their_squares():
    timeline = timeline_of(
        ("backbone", COMPUTE, "train", 20, 0, 0.5),
        ("backbone", COMMUNICATION, "train", 20, -1, 9.0),
        ("backbone", STALL, "train", 20, 1, 9.0),
        ("backbone", COMPUTE, "train", 20, 1, 0.25),
    )
    times = measured(step_of(RankShard(0, 2, None, 1)), timeline)
    assert times == {"backbone": [[7.0, 25.0, 0.5], [5.0, 25.0, 0.25]], "encoder": []}


def test_an_encoder_batchs_forwards_and_backward_count_together():
    timeline = timeline_of(
        ("encoder", COMPUTE, "train", 20, 0, 0.5),
        ("encoder", COMPUTE, "train", 20, 1, 0.25),
        ("encoder", COMPUTE, "train", 20, 0, 0.5),
        ("encoder", COMPUTE, "train", 20, 0, 1.0),
    )
    times = measured(step_of(RankShard(None, 2, 0, 1)), timeline)
    assert times == {"backbone": [], "encoder": [[9.0, 65.0, 2.0], [6.0, 20.0, 0.25]]}


def test_what_was_encoded_ahead_belongs_to_its_own_step_and_other_stages_do_not_count():
    timeline = timeline_of(
        ("encoder", COMPUTE, "train", 11, 0, 3.0),
        ("encoder", COMPUTE, "train", 20, 0, 0.5),
        ("encoder", COMPUTE, "val", 0, 0, 4.0),
        ("encoder", COMPUTE, "train", 13, 0, 4.0),
        ("encoder", COMPUTE, "train", 21, 0, 5.0),
    )
    times = measured(step_of(RankShard(None, 2, 0, 1)), timeline)
    assert times["encoder"] == [[9.0, 65.0, 0.5]]
