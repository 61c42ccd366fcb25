"""What the processes of these tests train: a machine on which attention is dear, from some step on dearer still."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

from flowtrain_lightning import FlowCheckpointIO
from flowtrain_lightning.callbacks import AdaptCosts
from flowtrain_lightning.data import PackedBatch, PackingConfig, StepBatch
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.parallel.connecting import disconnect_groups
from tests.exactness.layouts import trainer_for
from tests.tiny import TinyVLM, tiny_data

SLOWER_FROM = 8


class DearAttention(TinyVLM):
    """Takes four microseconds for each pair of tokens of a sequence, later twice that."""

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> Any:
        pairs = float((torch.diff(batch.cu_seqlens).double() ** 2).sum())
        time.sleep(pairs * (4e-6 if self.trainer.global_step < SLOWER_FROM else 8e-6))
        return super().backbone_step(batch, features, stage)


class Notes(L.Callback):
    """Keeps every step's plan, and saves a checkpoint after one of them."""

    def __init__(self, save_at: int) -> None:
        self.save_at = save_at
        self.steps: list[list[Any]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        plan = batch.plan
        microbatches = [[members.tolist() for members in of_rank] for of_rank in plan.microbatches]
        media = [[members.tolist() for members in of_rank] for of_rank in plan.encoder_batches]
        self.steps.append([batch.epoch, batch.step, plan.samples.tolist(), microbatches, media])
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    adapts: bool = True,
    replay: str | None = None,
    resume: str | None = None,
    freeze_encoder: bool = False,
    cost: dict[str, float] | None = None,
    **settings: Any,
) -> None:
    """Trains; writes the plans of all steps and the changes of costs."""
    settings["packing"] = PackingConfig(cost=cost and CostModel(**cost))
    notes, adapting = Notes(-1 if resume else 20), AdaptCosts(replay)
    trainer = trainer_for(
        layout,
        max_epochs=2,
        logger=CSVLogger(folder, "log", "0"),
        callbacks=[*([adapting] if adapts else []), notes],
        log_every_n_steps=1,
        precision="64-true",
        default_root_dir=folder,
        plugins=[FlowCheckpointIO()] if layout == "auto" else None,
    )
    trainer.fit(
        DearAttention(freeze_encoder=freeze_encoder), datamodule=tiny_data(Path(data), **settings), ckpt_path=resume
    )
    changes = [change.state_dict() for change in adapting.changes]
    rank = os.environ.get("RANK", "0")
    (folder / f"rank{rank}.json").write_text(json.dumps({"steps": notes.steps, "changes": changes}))
    disconnect_groups()


def train_twice(folder: Path, *, data: str) -> None:
    """Two runs, each with a Trainer of its own, that share the callback; writes the changes of each run."""
    adapting, changes = AdaptCosts(), []
    for number in range(2):
        trainer = trainer_for(
            "colocated 1",
            max_epochs=1,
            logger=False,
            callbacks=[adapting],
            precision="64-true",
            default_root_dir=folder / str(number),
        )
        trainer.fit(DearAttention(), datamodule=tiny_data(Path(data)))
        changes.append([change.state_dict() for change in adapting.changes])
    (folder / "rank0.json").write_text(json.dumps(changes))
    disconnect_groups()
