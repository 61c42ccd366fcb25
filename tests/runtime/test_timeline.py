"""What lanes did when: kept, summed and saved."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from flowtrain_lightning.pool import WAIT_LIMITS, Occupancy, PoolCounters
from flowtrain_lightning.runtime import timeline as timeline_module
from flowtrain_lightning.runtime.step import RankContext
from flowtrain_lightning.runtime.timeline import COMPUTE, STALL, DeviceClock, Span, Timeline
from tests.runtime.late_device import LateDevice


def test_a_span_is_the_time_from_start_to_stop():
    timeline = Timeline()
    timeline.stop(timeline.start(), "encoder", COMPUTE, "forward", "train", 3, 7)
    (span,) = timeline.spans
    assert span[:6] == ("encoder", COMPUTE, "forward", "train", 3, 7)
    assert span.end >= span.start


def test_shares_are_of_the_recorded_time_of_one_lane():
    timeline = Timeline()
    timeline.add(Span("encoder", COMPUTE, "forward", "train", 0, 0, 10.0, 13.0))
    timeline.add(Span("encoder", STALL, "room", "train", 0, -1, 13.0, 14.0))
    timeline.add(Span("backbone", COMPUTE, "forward", "train", 0, 0, 10.0, 12.0))
    assert timeline.share("encoder", STALL) == 0.25
    assert timeline.share("backbone", COMPUTE) == 1.0
    assert timeline.share("generator", STALL) == 0.0


def test_totals_know_all_spans_while_only_the_latest_are_kept(monkeypatch):
    monkeypatch.setattr(timeline_module, "KEPT_SPANS", 2)
    timeline = Timeline()
    for number in range(5):
        timeline.add(Span("encoder", COMPUTE, "forward", "train", 0, number, 0.0, 1.0))
    assert [span.number for span in timeline.spans] == [3, 4]
    assert timeline.totals["encoder", COMPUTE] == 5.0


def test_spans_of_a_device_count_once_it_has_ended_them_and_the_host_never_waits():
    device = LateDevice()
    timeline = Timeline(DeviceClock(device.record, now=device.host_clock))
    for number in range(3):
        start = timeline.start()
        device.give(0.5)
        timeline.stop(start, "backbone", COMPUTE, "forward", "train", 0, number)
    assert not timeline.spans
    assert not timeline.is_settled("train", 0)
    device.host += 1.2  # as long as two microbatches take, and some of the third
    assert [span.number for span in timeline.spans] == [0, 1]
    assert timeline.totals["backbone", COMPUTE] == pytest.approx(1.0)
    device.host += 0.5
    assert timeline.is_settled("train", 0)
    assert [round(span.end - span.start, 9) for span in timeline.spans] == [0.5, 0.5, 0.5]
    assert device.waits == 0


def test_what_a_device_waits_for_through_the_pool_is_a_stall_though_the_host_goes_on():
    device = LateDevice()
    timeline = Timeline(DeviceClock(device.record, now=device.host_clock))
    copies = SimpleNamespace(is_late=True, hand_over=lambda tensors: device.give(2.0))  # an encoder is not done yet
    step = SimpleNamespace(stage="train", index=0)
    RankContext(None, None, None, timeline, {}).hand_over(copies, [], "backbone", step)
    start = timeline.start()
    device.give(1.0)
    timeline.stop(start, "backbone", COMPUTE, "forward", "train", 0, 0)
    device.host += 3.0
    assert timeline.share("backbone", STALL) == pytest.approx(2 / 3)
    assert device.waits == 0


def test_a_timeline_is_saved_whole_though_the_device_is_late(tmp_path):
    device = LateDevice()
    timeline = Timeline(DeviceClock(device.record, now=device.host_clock))
    start = timeline.start()
    device.give(2.0)
    timeline.stop(start, "backbone", COMPUTE, "forward", "train", 0, 0)
    timeline.save(tmp_path / "rank0.json", rank=0, label="backbone 0")
    assert json.loads((tmp_path / "rank0.json").read_text())["totals"] == {"backbone": {"compute": 2.0}}


def test_a_saved_timeline_reads_as_json(tmp_path):
    timeline = Timeline()
    timeline.add(Span("encoder", COMPUTE, "forward", "train", 0, 2, 10.0, 13.0))
    room = Occupancy(now=0, peak=64, capacity=128)
    counters = PoolCounters("shared_memory", 1, 64, 0, 0, 0, 0, 0.0, (0,) * (len(WAIT_LIMITS) + 1), room, room)
    timeline.save(tmp_path / "new" / "timeline-rank1.json", rank=1, label="encoder 0", pool=counters)
    saved = json.loads((tmp_path / "new" / "timeline-rank1.json").read_text())
    assert saved.pop("clock") == pytest.approx(time.time() - time.monotonic(), abs=1)
    assert saved == {
        "rank": 1,
        "label": "encoder 0",
        "totals": {"encoder": {"compute": 3.0}},
        "pool": json.loads(json.dumps(asdict(counters))),
        "spans": [["encoder", "compute", "forward", "train", 0, 2, 10.0, 13.0]],
    }
