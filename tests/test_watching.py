"""The page about watching a run: its logger and callbacks run as they stand, and its metrics are those that come."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb")

import wandb

from tests.exactness.layouts import trainer_for
from tests.lightning.wandb_file import read_history
from tests.tiny import TinyVLM, tiny_data, write_records

PAGE = (Path(__file__).parents[1] / "docs/watching.md").read_text(encoding="utf-8")


def test_the_logger_and_callbacks_of_the_page_show_its_metrics(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    block = block.replace('save_dir="runs"', "save_dir=folder, offline=True").replace(
        "every_n_steps=20", "every_n_steps=1"
    )
    block, ours = re.subn(r"L\.Trainer\(.*\)", "new_trainer(logger=logger, callbacks=callbacks)", block)
    assert ours == 1

    def new_trainer(**given: Any) -> Any:
        shown = {"enable_progress_bar": True, "limit_val_batches": 1, "val_check_interval": 2}
        return trainer_for("auto", max_steps=2, default_root_dir=tmp_path, **shown, **given)

    names: dict[str, Any] = {"folder": str(tmp_path), "new_trainer": new_trainer}
    exec(block, names)
    for stage, count in (("train", 16), ("val", 8), ("predict", 2)):
        write_records(tmp_path, count, f"{stage}.jsonl")
    names["trainer"].fit(TinyVLM(), tiny_data(tmp_path))
    names["logger"].experiment.finish()
    wandb.teardown()  # waits for the process that writes the file
    told = set(re.findall(r"^\| `((?:throughput|packing)/\w+)` ", PAGE, flags=re.MULTILINE))
    assert len(told) == 4
    assert told <= set().union(*read_history(tmp_path))
