"""Modules whose methods do on one rank, or in one batch, what other ranks would have to do with it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import torch

from tests.lightning.run_context import RunContext
from tests.tiny import TinyVLM, write_records


class Gathering(TinyVLM):
    """Asks all ranks for their losses in a microbatch."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        loss, tokens = super().loss(outputs, batch)
        self.all_gather(loss.detach())
        return loss, tokens


class SkippingAlone(TinyVLM):
    """Leaves the first epoch after two steps, on rank 0 alone."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 2 and self.trainer.is_global_zero else None


class InPlace(TinyVLM):
    """Writes into the features that it is given."""

    def merge(self, batch: Any, features: dict[str, Any]) -> dict[str, Any]:
        for level in features.values():
            level.mul_(2.0)
        return super().merge(batch, features)


class CountingRows(TinyVLM):
    """Counts, in a buffer of no half, what its encoder makes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))

    def encode(self, media: Any) -> Any:
        self.rows += sum(media.rows)
        return super().encode(media)


class LateTeacher(TinyVLM):
    """Keeps a copy of its encoder, which it makes when training begins."""

    def on_train_start(self) -> None:
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)


KINDS = {kind.__name__: kind for kind in (Gathering, SkippingAlone, InPlace, CountingRows, LateTeacher)}


def train(folder: Path, kind: str, data_folder: str, layout: str = "1+1") -> None:
    """Trains for two epochs; the ranks end together."""
    L.seed_everything(7, verbose=False)
    context = RunContext(layout, folder, Path(data_folder))
    trainer = context.trainer(max_epochs=2, limit_val_batches=0, enable_checkpointing=False)
    trainer.fit(KINDS[kind](), context.data(shuffle=False))


def write_equal_records(folder: Path) -> Path:
    """Records with one picture of one size each, so that all steps have equally many rows of features."""
    path = write_records(folder, 1, pictures_of=[1])
    path.write_text(40 * path.read_text())
    return folder


def train_from_loaders(folder: Path, data_folder: str, layout: str) -> None:
    """Trains from loaders that were made before there were ranks."""
    context = RunContext(layout, folder, Path(data_folder))
    (data := context.data()).setup("fit")
    trainer = context.trainer(max_epochs=1, enable_checkpointing=False)
    trainer.fit(TinyVLM(), data.train_dataloader(), data.val_dataloader())
