"""Timelines as a trace: a process for each rank, a track for each lane, and nothing that overlaps on one track."""

from __future__ import annotations

import json

from flowtrain_lightning.callbacks.trace_events import write_trace

SECOND = 1e6
"""Traces count microseconds."""


def timeline(rank, clock, *spans):
    return {"rank": rank, "label": f"encoder {rank}", "clock": clock, "spans": spans}


def span(kind, start, end, number=0, lane="encoder", step=3):
    return [lane, kind, "forward" if kind == "compute" else "features", "train", step, number, start, end]


def traced(path, *timelines):
    """Names of tracks by process and number, and the spans."""
    write_trace(timelines, path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return names, [event for event in events if event["ph"] == "X"]


def test_a_span_is_a_slice_on_the_track_of_its_lane(tmp_path):
    names, (slice_,) = traced(tmp_path / "trace.json", timeline(2, 0.0, span("compute", 10.0, 10.5, number=7)))
    assert names == {(2, 0): "encoder"}
    assert (slice_["pid"], slice_["tid"], slice_["name"], slice_["cat"]) == (2, 0, "forward 7", "compute")
    assert (slice_["ts"], slice_["dur"]) == (0.0, 0.5 * SECOND)
    assert slice_["args"] == {"stage": "train", "step": 3}


def test_ranks_of_several_nodes_are_brought_onto_one_clock(tmp_path):
    here, there = timeline(0, 1000.0, span("compute", 10.0, 11.0)), timeline(1, 5.0, span("compute", 1006.0, 1007.0))
    _, slices = traced(tmp_path / "trace.json", here, there)
    assert [slice_["ts"] for slice_ in slices] == [0.0, 1.0 * SECOND]


def test_copies_that_overlap_have_tracks_of_their_own(tmp_path):
    spans = [
        span("compute", 0.0, 4.0),
        span("communication", 1.0, 3.0, -1),
        span("communication", 2.0, 5.0, -1),
        span("communication", 3.0, 4.0, -1),
        span("stall", 4.0, 5.0, -1),
    ]
    names, slices = traced(tmp_path / "trace.json", timeline(0, 0.0, *spans))
    tracks = [names[0, slice_["tid"]] for slice_ in slices]
    assert tracks == [
        "encoder",
        "encoder: communication",
        "encoder: communication 2",
        "encoder: communication",
        "encoder",
    ]


def test_a_run_without_steps_is_an_empty_trace(tmp_path):
    assert traced(tmp_path / "new" / "trace.json", timeline(0, 0.0)) == ({}, [])
