"""A rank's part in training with a frozen encoder and a slow backbone: losses and what its lanes did."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from flowtrain_lightning import PoolSettings
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from flowtrain_lightning.runtime.timeline import Span
from tests.checkpoint.test_mid_epoch import Stream
from tests.exactness.layouts import trainer_for
from tests.forks import write_down
from tests.tiny import TinyVLM, tiny_data


class SlowBackbone(TinyVLM):
    """Its backbone takes its time, so that a frozen encoder can work ahead.

    Attributes:
        skips_from: epoch and batch from which on the rest of the epoch is skipped.
        changes_at: epoch and batch before which the encoder's weights are changed.
        writes_at: epoch and batch before which a buffer of the encoder is written.
        killed_at: a rank, and its encoder batch in training at which it is killed.
    """

    skips_from = (-1, -1)
    changes_at = (-1, -1)
    writes_at = (-1, -1)
    killed_at = (-1, -1)
    _encoded = 0

    def configure_encoder(self) -> None:
        super().configure_encoder()
        if self.writes_at != (-1, -1):
            self.encoder.register_buffer("level", torch.ones(1))

    def encode(self, media: Any) -> Any:
        self._encoded += self.trainer.training
        if (self.trainer.global_rank, self._encoded) == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(media)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if (self.current_epoch, batch_idx) == self.changes_at:
            with torch.no_grad():
                for weight in self.encoder.parameters():
                    weight.mul_(0.5)
        if (self.current_epoch, batch_idx) == self.writes_at:
            self.encoder.level.mul_(0.5)
        return -1 if (self.current_epoch, batch_idx) == self.skips_from else None

    def backbone_step(self, batch: Any, features: Any, stage: str) -> Any:
        time.sleep(0.03)
        return super().backbone_step(batch, features, stage)


class Notes(L.Callback):
    """Losses of training and validation, what the lanes did, and how often tensors were broadcast in training."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.broadcasts = 0
        self.train: list[float] = []
        self.val: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        broadcast = torch.distributed.broadcast

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.broadcasts += 1
            return broadcast(*args, **kwargs)

        torch.distributed.broadcast = counted

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any) -> None:
        self.train.append(float(outputs["loss"]))

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.val.append(float(outputs))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if hasattr(trainer.strategy, "runner"):
            self.spans = list(trainer.strategy.runner.timeline.spans)


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    pool_bytes: int | None = None,
    roles: dict[str, Any] | None = None,
    skips_from: Sequence[int] = (-1, -1),
    changes_at: Sequence[int] = (-1, -1),
    writes_at: Sequence[int] = (-1, -1),
    killed_at: Sequence[int] = (-1, -1),
    precision: str = "64-true",
    streams: bool = False,
    **trainer: Any,
) -> None:
    """Trains with a frozen encoder; writes what `Notes` found."""
    notes = Notes()
    chosen = trainer_for(
        layout,
        strategy={"pool": PoolSettings(bytes=pool_bytes), **({"roles": roles} if roles else {})},
        callbacks=[notes],
        precision=precision,
        default_root_dir=folder,
        **trainer,
    )
    module = SlowBackbone(freeze_encoder=True)
    module.skips_from, module.changes_at = tuple(skips_from), tuple(changes_at)
    module.killed_at, module.writes_at = tuple(killed_at), tuple(writes_at)
    source = {"train": Stream(Path(data) / "train.jsonl")} if streams else {}
    chosen.fit(module, datamodule=tiny_data(Path(data), shuffle=False, **source))
    found = {"train": notes.train, "val": notes.val, "spans": notes.spans, "broadcasts": notes.broadcasts}
    write_down(folder, found)
    disconnect_groups()
