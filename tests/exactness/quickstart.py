"""The first steps of the quickstart, as its configuration says, on any layout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flowtrain_lightning.cli import main
from flowtrain_lightning.parallel.connecting import disconnect_groups
from tests.exactness.layouts import ranks_of
from tests.paths import ROOT

STEPS = 50


def train(folder: Path, *, layout: str) -> None:
    """Trains ``STEPS`` steps; the losses are in ``log/metrics.csv``."""
    os.chdir(ROOT)
    kind, _, _ = layout.partition(" ")
    named = "--trainer.strategy=flowtrain_lightning.FlowTrainStrategy"
    if kind == "colocated":
        strategy = [named, "--trainer.strategy.placement=colocated"]
    elif "+" in kind:
        strategy = [named, f"--trainer.strategy.encoder_ranks={kind.split('+')[0]}"]
    else:
        strategy = [f"--trainer.strategy={kind}"]
    sys.argv = [
        "flowtrain",
        "fit",
        "--config=recipes/quickstart/config.yaml",
        *strategy,
        f"--trainer.devices={ranks_of(layout)}",
        f"--trainer.max_steps={STEPS}",
        "--trainer.limit_val_batches=0",
        "--trainer.callbacks=[]",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        f"--trainer.default_root_dir={folder}",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={folder}",
        "--trainer.logger.name=log",
        "--trainer.logger.version=",
        f"--data.index.cache_dir={folder.parent}/index",
    ]
    main()
    disconnect_groups()
