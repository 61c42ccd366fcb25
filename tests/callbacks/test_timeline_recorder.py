"""What ranks saved of their lanes when fit ended."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
from PIL import Image

from flowtrain_lightning.callbacks import TimelineRecorder
from flowtrain_lightning.callbacks.timeline_recorder import draw_step, draw_steps, read_timelines
from tests.tiny import TinyVLM, tiny_data, write_records


def recorded_ranks(folder: Path) -> list[int]:
    """Trains one step on one rank; whose timelines there are then."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    settings = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False, **quiet}
    trainer = L.Trainer(strategy="flowtrain", callbacks=[TimelineRecorder(folder)], **settings)
    trainer.fit(TinyVLM(), tiny_data(folder, global_batch_size=4))
    return [timeline["rank"] for timeline in read_timelines(folder / "timeline")]


def test_what_an_earlier_run_of_more_ranks_saved_in_the_folder_is_not_taken_for_this_ones(tmp_path):
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
        [lane, "compute", "microbatch", "train", 3, 0, 0.01 * start, 0.01 * (start + 1)]
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


def test_a_run_that_never_trained_has_no_picture_of_a_step(tmp_path):
    draw_step([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
