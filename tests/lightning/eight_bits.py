"""What the processes of the tests of 8-bit optimizers run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flowtrain_lightning.parallel.connecting import disconnect_groups
from tests.exactness.data import STEPS, steps_data
from tests.exactness.layouts import trainer_for
from tests.exactness.train import Recorder, weights_of
from tests.tiny import TinyVLM

SAVED_AT = 3


class SavingRecorder(Recorder):
    """Also saves ``saved.ckpt`` on the way."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.folder / "saved.ckpt")


class EightBitVLM(TinyVLM):
    """Its larger matrices have AdamW's moments in 8 bits."""

    def configure_optimizers(self) -> Any:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(self.parameters(), lr=1e-2, min_8bit_size=512)


def train(
    folder: Path, *, data: str, layout: str, roles: dict[str, Any] | None = None, resume: str | None = None
) -> None:
    """Trains; every rank writes down losses and weights, and how many moments are in 8 bits."""
    recorder = SavingRecorder(folder)
    strategy = {"roles": roles} if roles else None
    trainer = trainer_for(
        layout,
        strategy=strategy,
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[recorder],
        default_root_dir=folder,
    )
    module = EightBitVLM()
    trainer.fit(module, datamodule=steps_data(Path(data)), ckpt_path=resume)
    states = trainer.optimizers[0].state.values()
    quantised = sum(str(entries["state1"].dtype) == "torch.uint8" for entries in states)
    seen = {"losses": recorder.losses, "weights": weights_of(module), "quantised": quantised}
    torch.save(seen, folder / f"rank{trainer.global_rank}.pt")
    disconnect_groups()
