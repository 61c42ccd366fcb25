"""On real pictures the loss curves of all layouts lie on one another."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pytest

from flowtrain_lightning.cli import main
from flowtrain_lightning.parallel.connecting import disconnect_groups
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs
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


pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def losses(folder: Path, layout: str) -> list[float]:
    job = Job(layout, f"{__name__}:train", ranks_of(layout), {"layout": layout})
    done = run_jobs(folder, [job])[layout].check()
    with (done.folder / "log" / "metrics.csv").open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[float]:
    """The losses of one process."""
    return losses(folder, "auto")


@pytest.mark.parametrize("layout", ["ddp 2", "colocated 2", "1+1", "1+2"])
def test_the_loss_curve_of_the_quickstart_is_that_of_one_process(folder, alone, layout):
    assert len(alone) == STEPS
    assert alone[-1] < 0.5 * alone[0]
    assert losses(folder, layout) == pytest.approx(alone, rel=1e-4)
