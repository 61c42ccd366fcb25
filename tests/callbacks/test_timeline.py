"""What ranks saved of their lanes when fit ended."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L

from flowtrain_lightning.callbacks import TimelineRecorder
from flowtrain_lightning.callbacks.timeline import read_timelines
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
