"""``flowtrain fit`` with a YAML file starts ranks by itself, and runs under torchrun."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from tests.lightning.layout_runs import launch

SECONDS = 600
"""The longest wait: on a machine short of memory a fresh process needs minutes for its imports alone."""

FLOWTRAIN = str(Path(sys.executable).with_name("flowtrain"))

CONFIG = """
seed_everything: 7
model: {class_path: tests.tiny.TinyVLM, init_args: {lr: 0.01}}
data: {class_path: tests.lightning.wired.TinyData, init_args: {folder: DATA}}
trainer:
  accelerator: cpu
  devices: 2
  precision: 64-true
  max_epochs: 1
  enable_progress_bar: false
  log_every_n_steps: 1
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: ., name: csv, version: ""}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
  strategy: STRATEGY
"""

BY_NAME = "flowtrain"
BY_CLASS = "{class_path: flowtrain_lightning.FlowTrainStrategy, init_args: {encoder_ranks: 1, hang_timeout: 300}}"


@pytest.mark.parametrize(
    ("strategy", "launcher", "reason"),
    [
        (BY_CLASS, (), "because it was asked for"),
        pytest.param(
            BY_NAME,
            (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            "is predicted to be",
            marks=pytest.mark.full,
        ),
    ],
    ids=["by class with Lightning's launcher", "by name under torchrun"],
)
def test_fit_trains_as_the_yaml_says(tmp_path, data_folder, strategy, launcher, reason):
    config = CONFIG.replace("DATA", json.dumps(str(data_folder))).replace("STRATEGY", strategy)
    (tmp_path / "config.yaml").write_text(config)
    with launch([*launcher, FLOWTRAIN, "fit", "--config", "config.yaml"], tmp_path / "log") as process:
        assert process.wait(SECONDS) == 0, (tmp_path / "log").read_text()
    printed = (tmp_path / "log").read_text()
    assert printed.count("flowtrain: separate: ") + printed.count("flowtrain: colocated: ") == 1
    assert reason in printed
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert (tmp_path / "csv" / "config.yaml").is_file()
    (checkpoint,) = (tmp_path / "csv" / "checkpoints").iterdir()
    assert {path.name for path in checkpoint.iterdir()} >= {"encoder", "backbone"}
