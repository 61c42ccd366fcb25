"""What the processes of the tests of averaged weights run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from flowtrain_lightning.callbacks import AverageWeights
from flowtrain_lightning.parallel.connecting import disconnect_groups
from tests.exactness.data import STEPS, steps_data
from tests.exactness.layouts import trainer_for
from tests.exactness.modules import Divided
from tests.exactness.train import weights_of

DECAY = 0.7
SAVED_AT = 3


class Notes(L.Callback):
    """Keeps validation losses and the weights after each step, and saves a checkpoint on the way.

    Args:
        folder: where ``saved.ckpt`` is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.validations: list[float] = []
        self.weights: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.weights.append(weights_of(pl_module))
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.folder / "saved.ckpt")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validations.append(float(trainer.callback_metrics["val_loss"]))


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    precision: str = "64-true",
    roles: dict[str, Any] | None = None,
    by_lightning: bool = False,
    decay: float | None = DECAY,
    resume: str | None = None,
) -> None:
    """Trains, validating every two steps; every rank writes down what it saw and what it ended with."""
    notes = Notes(folder)
    average = EMAWeightAveraging(decay=DECAY) if by_lightning else AverageWeights(decay)
    trainer = trainer_for(
        layout,
        strategy={"roles": roles} if roles else None,
        precision=precision,
        max_steps=STEPS,
        val_check_interval=2,
        callbacks=[average, notes],
        default_root_dir=folder,
    )
    module = Divided(lr=1e-3)
    trainer.fit(module, datamodule=steps_data(Path(data)), ckpt_path=resume, weights_only=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    seen = {"averages": weights_of(module), "steps": notes.weights, "validations": notes.validations}
    torch.save(seen, folder / f"rank{trainer.global_rank}.pt")
    disconnect_groups()
