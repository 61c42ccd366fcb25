"""Figures are those since the last time they were taken."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from flowtrain_lightning.pool import WAIT_LIMITS, Occupancy, PoolCounters
from flowtrain_lightning.runtime.figures import RankMetricsTaker
from flowtrain_lightning.runtime.timeline import COMPUTE, STALL, Span, Timeline

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
    taker = RankMetricsTaker({"encoder": "encoder 1"}, "encoder 1", timeline)
    spend(timeline, COMPUTE, 3.0)
    spend(timeline, STALL, 1.0)
    assert taker.take(None) == {
        "encoder 1/compute": 0.75,
        "encoder 1/stall": 0.25,
        "encoder 1/communication": 0.0,
    }
    spend(timeline, STALL, 9.0)
    assert taker.take(None)["encoder 1/stall"] == 1.0
    assert taker.take(None)["encoder 1/stall"] == 0.0


def test_the_pool_is_told_as_rates_and_shares():
    taker = RankMetricsTaker({}, "encoder 1", Timeline())
    time.sleep(0.01)
    first = taker.take(COUNTERS)
    assert first["encoder 1/pool_put"] == pytest.approx(6 * first["encoder 1/pool_read"]) != 0
    assert first["encoder 1/pool_peak"] == 0.2
    time.sleep(0.01)
    second = taker.take(replace(COUNTERS, entries=4, refused=3))
    assert second["encoder 1/pool_put"] == 0
    assert second["encoder 1/pool_refused"] == 1


def test_a_pool_that_was_opened_anew_is_told_from_its_beginning():
    taker = RankMetricsTaker({}, "encoder 1", Timeline())
    taker.take(COUNTERS)
    time.sleep(0.01)
    told = taker.take(replace(COUNTERS, entries=1, bytes=1000, refused=1, waits=1))
    assert told["encoder 1/pool_put"] > 0
    assert told["encoder 1/pool_refused"] == 1
