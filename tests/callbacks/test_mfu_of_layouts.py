"""FLOPs are counted on the module as it was before ranks shared its weights: MFU is told in every layout."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger

import flowtrain_lightning as flow
from flowtrain_lightning.callbacks import FlowMonitor
from tests.exactness.modules import Deep, Divided
from tests.forks import Job, run_jobs
from tests.tiny import tiny_data, write_records

LAYOUTS: dict[str, tuple[type[flow.FlowModule], dict[str, Any]]] = {
    "copies": (Deep, {}),
    "shards": (Deep, {"encoder": {"shard": "fsdp", "recompute": "full"}, "backbone": {"shard": "fsdp"}}),
    "divided copies": (Divided, {}),
    "tensor ranks": (Divided, {"backbone": {"tensor": 2}}),
}


def train_all(folder: Path) -> None:
    """A step in each layout, one after another in the same processes."""
    for name, (module, roles) in LAYOUTS.items():
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=flow.FlowTrainStrategy(placement="colocated", roles=roles),
            max_steps=1,
            limit_val_batches=0,
            logger=CSVLogger(folder / name, "", ""),
            callbacks=[FlowMonitor(every_n_steps=1, peak_flops=1e12)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module(), tiny_data(folder))


def share_of_encoder(folder: Path) -> float:
    """FLOPs of the encoder beside those of the backbone."""
    with (folder / "metrics.csv").open(encoding="utf-8") as lines:
        row = next(row for row in csv.DictReader(lines) if row["mfu/encoder"])
    return float(row["mfu/encoder"]) / float(row["mfu/backbone"])


@pytest.mark.timeout(200)
def test_mfu_does_not_depend_on_how_ranks_hold_weights(tmp_path: Path) -> None:
    write_records(tmp_path / "runs", 16)
    runs = run_jobs(tmp_path, [Job("runs", f"{__name__}:train_all", 2)])["runs"].check()
    shares = {name: share_of_encoder(runs.folder / name) for name in LAYOUTS}
    assert shares["shards"] == pytest.approx(shares["copies"], rel=1e-9)
    assert shares["tensor ranks"] == pytest.approx(shares["divided copies"], rel=1e-9)
