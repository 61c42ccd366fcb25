"""What a rank tells of itself: metrics since the last time, and how long a step's batches took."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.data import RankShard, StepBatch
from flowtrain_lightning.packing import SampleSizes, StepPlan
from flowtrain_lightning.pool import WAIT_LIMITS, Occupancy, PoolCounters
from flowtrain_lightning.runtime.program_of_plan import make_program
from flowtrain_lightning.runtime.rank_metrics import BatchTimes, RankMetrics
from flowtrain_lightning.runtime.step import Step
from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE, STALL, Span, Timeline
from tests.packing.sizes import shard_of

COUNTERS = PoolCounters(
    transport="shared_memory",
    entries=3,
    bytes=3000,
    moved_bytes=3000,
    leased_bytes=500,
    refused=2,
    waits=4,
    wait_seconds=0.0,
    wait_histogram=(0,) * (len(WAIT_LIMITS) + 1),
    current=Occupancy(10, 300, 1000),
    ahead=Occupancy(0, 100, 1000),
)


def spend(timeline: Timeline, kind: str, seconds: float) -> None:
    timeline.add(Span("encoder", kind, "work", "train", 0, 0, 0.0, seconds))


def test_shares_are_of_the_time_since_the_last_call():
    timeline = Timeline()
    metrics = RankMetrics({"encoder": "encoder 1"}, "encoder 1", timeline)
    spend(timeline, COMPUTE, 3.0)
    spend(timeline, STALL, 1.0)
    told = metrics.take(None)
    assert told.pop("memory/encoder 1") > 1e6, "of this process"
    assert told == {
        "time/encoder 1 compute": 0.75,
        "time/encoder 1 stall": 0.25,
        "time/encoder 1 communication": 0.0,
    }
    spend(timeline, STALL, 9.0)
    assert metrics.take(None)["time/encoder 1 stall"] == 1.0
    assert metrics.take(None)["time/encoder 1 stall"] == 0.0


def test_the_pool_is_told_as_rates_and_shares():
    metrics = RankMetrics({}, "encoder 1", Timeline())
    time.sleep(0.01)
    first = metrics.take(COUNTERS)
    assert first["pool/encoder 1 put"] == pytest.approx(6 * first["pool/encoder 1 read"]) != 0
    assert first["pool/encoder 1 peak"] == 0.2
    time.sleep(0.01)
    second = metrics.take(replace(COUNTERS, entries=4, refused=3, fallbacks=2))
    assert second["pool/encoder 1 put"] == 0
    assert second["pool/encoder 1 refused"] == 1
    assert second["pool/encoder 1 fallbacks"] == 2


def test_a_pool_that_was_opened_anew_is_told_from_its_beginning():
    metrics = RankMetrics({}, "encoder 1", Timeline())
    metrics.take(COUNTERS)
    time.sleep(0.01)
    told = metrics.take(replace(COUNTERS, entries=1, bytes=1000, refused=1, waits=1))
    assert told["pool/encoder 1 put"] > 0
    assert told["pool/encoder 1 refused"] == 1


def step_of(part: RankShard, index: int = 20) -> Step:
    tokens = np.array([3, 4, 5, 6])
    sizes = SampleSizes(tokens, tokens, np.array([0, 1, 2, 3, 4]), np.ones(4, dtype=np.int64), np.array([8, 4, 2, 1]))
    numbers = [np.array([number]) for number in range(4)]
    microbatches = ((np.array([0, 1]), numbers[2]), (numbers[3], np.array([], dtype=np.int64)))
    plan = StepPlan(np.arange(4), sizes, {"backbone": microbatches, "encoder": ((np.array([0, 3]), np.array([1, 2])),)})
    return Step(StepBatch(plan, part, (), {}, 0, index), make_program(plan, part, 4), "train", index, ["encoder"])


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
    timings = BatchTimes(timeline).take(step_of(shard_of(1, 2, backbone=0)))
    assert timings == {"backbone": [[7.0, 25.0, 0.5], [5.0, 25.0, 0.25]], "encoder": []}


def test_an_encoder_batchs_forwards_and_backward_count_together():
    timeline = timeline_of(
        ("encoder", COMPUTE, "train", 20, 0, 0.5),
        ("encoder", COMPUTE, "train", 20, 1, 0.25),
        ("encoder", COMPUTE, "train", 20, 0, 0.5),
        ("encoder", COMPUTE, "train", 20, 0, 1.0),
    )
    timings = BatchTimes(timeline).take(step_of(shard_of(1, 2, encoder=0)))
    assert timings == {"backbone": [], "encoder": [[9.0, 65.0, 2.0], [6.0, 20.0, 0.25]]}


def test_work_ahead_counts_in_its_own_step_and_other_stages_do_not_count():
    timeline = timeline_of(
        ("encoder", COMPUTE, "train", 11, 0, 3.0),
        ("encoder", COMPUTE, "train", 20, 0, 0.5),
        ("encoder", COMPUTE, "val", 0, 0, 4.0),
        ("encoder", COMPUTE, "train", 13, 0, 4.0),
        ("encoder", COMPUTE, "train", 21, 0, 5.0),
    )
    timings = BatchTimes(timeline).take(step_of(shard_of(1, 2, encoder=0)))
    assert timings["encoder"] == [[9.0, 65.0, 0.5]]
