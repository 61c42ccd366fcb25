"""What ranks saved of their lanes when fit ended, and the trace of it."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
from PIL import Image

from flowtrain_lightning.callbacks import TimelineRecorder
from flowtrain_lightning.callbacks.timeline_recorder import draw_step, draw_steps, read_timelines, write_trace
from flowtrain_lightning.runtime.timeline import AGAIN, MOVED
from tests.tiny import TinyVLM, tiny_data, write_records


def recorded_ranks(folder: Path) -> list[int]:
    """Trains one step on one rank; whose timelines there are then."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    settings = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False, **quiet}
    trainer = L.Trainer(strategy="flowtrain", callbacks=[TimelineRecorder(folder)], **settings)
    trainer.fit(TinyVLM(), tiny_data(folder, global_batch_size=4))
    return [timeline["rank"] for timeline in read_timelines(folder / "timeline")]


def test_files_of_an_earlier_run_with_more_ranks_are_not_taken_for_this_run(tmp_path):
    write_records(tmp_path, 8)
    assert recorded_ranks(tmp_path) == [0]
    earlier = json.loads((tmp_path / "timeline" / "rank0.json").read_text())
    (tmp_path / "timeline" / "rank3.json").write_text(json.dumps({**earlier, "rank": 3}))
    assert recorded_ranks(tmp_path) == [0]
    assert (tmp_path / "timeline.png").is_file()
    trace = json.loads((tmp_path / "timeline" / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in trace if event["ph"] == "M"} >= {"backbone", "encoder"}
    assert len([event for event in trace if event["ph"] == "X"]) == len(earlier["spans"])


def one_rank(lanes: list[str]) -> list[dict]:
    """The timeline of a rank that worked for 10 ms in each of its lanes."""
    spans = [
        [lane, "compute", "forward", "train", 3, 0, 0.01 * start, 0.01 * (start + 1)]
        for start, lane in enumerate(lanes)
    ]
    return [{"rank": 0, "label": " and ".join(f"{lane} 0" for lane in lanes), "spans": spans}]


def test_steps_of_several_runs_are_drawn_above_each_other_a_row_per_lane(tmp_path):
    one, two = one_rank(["backbone"]), one_rank(["backbone", "encoder"])
    draw_steps({"one lane": (one, 3), "two lanes": (two, None)}, tmp_path / "both.png")
    draw_step(one, tmp_path / "one.png")
    heights = {}
    for name in ("both", "one"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            heights[name] = picture.height
    assert heights["both"] > 1.5 * heights["one"]


def test_of_many_ranks_the_first_ones_are_drawn(tmp_path):
    many = [{**one_rank(["backbone"])[0], "rank": rank, "label": f"backbone {rank}"} for rank in range(64)]
    heights = {}
    for ranks in (8, 64):
        draw_step(many[:ranks], tmp_path / f"{ranks}.png")
        with Image.open(tmp_path / f"{ranks}.png") as picture:
            heights[ranks] = picture.height
    assert heights[64] == heights[8]


def test_all_that_a_lane_computes_has_a_colour(tmp_path):
    (timeline,) = one_rank(["backbone"] * 5)
    for span, name in zip(timeline["spans"], ("forward", AGAIN, MOVED, "backward", "weights"), strict=True):
        span[2] = name
    draw_step([timeline], tmp_path / "all.png")
    assert (tmp_path / "all.png").is_file()


def test_a_run_that_never_trained_has_no_picture_of_a_step(tmp_path):
    draw_step([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


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
