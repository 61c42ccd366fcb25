"""What a rank does in the test of saving in the background under a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flowtrain_lightning.checkpoint import read_checkpoint
from flowtrain_lightning.parallel.connecting import disconnect_groups
from tests.exactness.data import steps_data
from tests.exactness.layouts import trainer_for
from tests.exactness.modules import Deep
from tests.exactness.train import weights_of
from tests.forks import write_down

SHARDED = {"encoder": {"shard": "fsdp"}, "backbone": {"shard": "fsdp"}}


def fit(folder: Path, *, data: str, layout: str) -> None:
    """Saves after each of three steps, and keeps the last; notes before each step whether there is a whole one."""
    kept = folder / "kept"
    whole: list[bool] = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            found = [path for path in kept.glob("*.ckpt") if not path.name.startswith(".")]
            if trainer.global_step > 1:  # the first save has ended when the second began
                whole.append(all("state_dict" in read_checkpoint(path) for path in found) and bool(found))

    trainer = trainer_for(
        layout,
        strategy={"roles": SHARDED, "background_saving": True},
        max_steps=3,
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[Look(), ModelCheckpoint(kept, filename="{step}", every_n_train_steps=1, save_top_k=1)],
        default_root_dir=folder,
    )
    module = Deep(lr=1e-3)
    trainer.fit(module, steps_data(Path(data)))
    weights = weights_of(module)
    torch.save(weights, folder / f"weights{trainer.global_rank}.pt")
    trainer.strategy.barrier()
    write_down(folder, {"left": sorted(path.name for path in kept.iterdir()), "whole": whole})
    disconnect_groups()
