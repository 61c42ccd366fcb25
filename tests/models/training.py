"""A training run of a Hugging Face model on any layout, as ranks of a job run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowtrain_lightning.parallel.groups import disconnect_groups
from tests.exactness.data import STEPS, steps_data
from tests.exactness.layouts import trainer_for
from tests.exactness.train import Recorder
from tests.models.tiny import FAMILIES


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    family: str,
    precision: str = "64-true",
    roles: dict[str, dict[str, Any]] | None = None,
    adapters: Any = None,
    frozen_in_bf16: bool = False,
) -> None:
    """Trains ``STEPS`` steps; every rank writes down what it computed, and all a checkpoint, ``last.ckpt``."""
    chosen, recorder = FAMILIES[family], Recorder()
    trainer = trainer_for(
        layout,
        strategy={"roles": roles} if roles else None,
        precision=precision,
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[recorder],
        default_root_dir=folder,
    )
    module = chosen.kind(chosen.config, adapters=adapters, frozen_in_bf16=frozen_in_bf16, lr=1e-2, weight_decay=0.1)
    trainer.fit(module, datamodule=steps_data(Path(data), images=chosen.images))
    trainer.save_checkpoint(folder / "last.ckpt")
    recorder.save(folder)
    disconnect_groups()
