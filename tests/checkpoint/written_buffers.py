"""A module whose forwards write buffers, and what each rank of a run has in them when it saves and when it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.data import steps_data
from tests.exactness.layouts import trainer_for
from tests.exactness.modules import Divided
from tests.forks import write_down

SAVED_AT = 2
STEPS = 4


class Statistics(nn.Module):
    """Centres what it is given by a running mean, and keeps a counter, an average through ``.data`` and a cache."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.ones(()))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x):
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.average.data.mul_(0.9).add_(0.1 * x.detach().std())
            self.cache = x.detach()[:, 0]
        return (x - self.mean) / (1 + self.average)


class Written(Divided):
    """Both halves keep statistics, and so does the module itself."""

    couples = ("encode", "backbone")  # what a batch gives depends on those before it

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("merged", torch.zeros((), dtype=torch.int64))

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.statistics = Statistics(16)

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.statistics = Statistics(16)

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return tuple(self.encoder.statistics(level) for level in super().encode(media))

    def merge(self, batch: Any, features: Any) -> dict[str, Any]:
        merged = super().merge(batch, features)
        self.merged += self.training
        return {**merged, "x": self.backbone.statistics(merged["x"])}


class Growing(Written):
    """A buffer of its backbone grows, by another length on each rank."""

    def merge(self, batch: Any, features: Any) -> dict[str, Any]:
        self.backbone.statistics.mean = self.backbone.statistics.mean.new_zeros(len(batch.tokens), 16).mean(0)
        self.backbone.statistics.average = self.backbone.statistics.average.new_ones(len(batch.tokens))
        merged = Divided.merge(self, batch, features)
        return {**merged, "x": merged["x"] + self.backbone.statistics.average.mean()}


class Notes(L.Callback):
    """What this rank has in its buffers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {"losses": {}, "validated": []}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found["began with"] = _buffers(pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.found["losses"][trainer.global_step] = float(outputs["loss"])
        if trainer.global_step == SAVED_AT:
            self.found["saved"] = _buffers(pl_module)
            trainer.save_checkpoint(self.folder / "saved.ckpt")

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.found["validated"] = _buffers(pl_module)


def _buffers(module: L.LightningModule) -> dict[str, Any]:
    """Those with memory, and the weights' own."""
    return {name: buffer.tolist() for name, buffer in module.named_buffers() if not buffer.is_meta}


KINDS: dict[str, type[Written]] = {"written": Written, "growing": Growing}


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    roles: dict[str, Any],
    resumed: str | None = None,
    freeze: bool = False,
    kind: str = "written",
) -> None:
    """Trains, saves in between, and validates at the end; or goes on from what another run saved."""
    notes = Notes(folder)
    precision = "32-true" if "deepspeed" in str(roles) else "64-true"
    trainer = trainer_for(
        layout,
        strategy={"roles": roles},
        precision=precision,
        max_steps=STEPS,
        check_val_every_n_epoch=None,
        val_check_interval=STEPS,
        limit_val_batches=1,
        callbacks=[notes],
        default_root_dir=folder,
    )
    try:
        trainer.fit(KINDS[kind](freeze_encoder=freeze), datamodule=steps_data(Path(data)), ckpt_path=resumed)
    except ValueError as error:
        notes.found["said"] = str(error)
    write_down(folder, notes.found)
    disconnect_groups()
