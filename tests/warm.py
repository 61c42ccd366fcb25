"""Does once what every forked rank would do first: imports, loading compiled loops, looking for packages."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import lightning as L
import torch
from tqdm import tqdm

from flowtrain_lightning import FlowTrainStrategy
from flowtrain_lightning.packing.compiled import compile_at_once
from tests.tiny import TinyVLM, tiny_data, write_records


def warm_up() -> None:
    """Validates once in this process, so that each fork's first step takes a fourth of the time that it else takes.

    Nothing of it stays but what is loaded: no thread, no random number drawn, no environment variable.
    """
    environment, interval, tqdm.monitor_interval = dict(os.environ), tqdm.monitor_interval, 0  # no monitor thread
    with tempfile.TemporaryDirectory() as name, torch.random.fork_rng([]):
        compile_at_once()
        write_records(folder := Path(name), 8, "train.jsonl")
        write_records(folder, 8, "val.jsonl")
        FlowTrainStrategy()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(accelerator="cpu", devices=1, limit_val_batches=1, default_root_dir=folder, **quiet)
        trainer.validate(TinyVLM(), tiny_data(folder), verbose=False)
    tqdm.monitor_interval = interval
    os.environ.clear()
    os.environ.update(environment)
