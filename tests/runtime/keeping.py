"""A rank's part in training with features that are kept: losses, forwards of the encoder, and what the log says."""

from __future__ import annotations

import logging
import os
import resource
import signal
from pathlib import Path
from typing import Any

import lightning as L
import torch

from flowtrain_lightning import KeepFeatures
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.layouts import trainer_for
from tests.forks import write_down
from tests.tiny import TinyVLM, tiny_data


class CountingVLM(TinyVLM):
    """Counts the forwards of its encoder, and is killed at one of them, on a rank."""

    calls = 0
    killed_at = (-1, -1)

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.register_buffer("level", torch.ones(1))  # which ranks share in every step

    def encode(self, media: Any) -> Any:
        self.calls += 1
        if (self.trainer.global_rank, self.calls) == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(media)


class Notes(L.Callback, logging.Handler):
    """Losses, forwards of the encoder up to the end of each epoch and validation, and sentences of the log.

    Args:
        full_from: batch of training from which on this process's files must be empty, as on a full disk.
        changes: epochs before whose start the encoder gets other weights.
        unfreezes: epoch from which on the encoder trains.
    """

    def __init__(self, full_from: int = -1, changes: tuple[int, ...] = (), unfreezes: int = -1) -> None:
        logging.Handler.__init__(self)
        self.found: dict[str, list[Any]] = {"train": [], "val": [], "calls": [], "said": []}
        self._full_from, self._changes, self._unfreezes = full_from, changes, unfreezes

    def emit(self, record: logging.LogRecord) -> None:
        if "features" in record.getMessage():
            self.found["said"].append(record.getMessage())

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        weights = list(pl_module.encoder.parameters())
        if trainer.current_epoch in self._changes and not any(weight.is_meta for weight in weights):
            with torch.no_grad():
                for weight in weights:
                    weight.mul_(0.5)
        if trainer.current_epoch == self._unfreezes:
            pl_module.encoder.requires_grad_(True)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._full_from:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.found["train"].append(float(outputs["loss"]))

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.found["val"].append(float(outputs))

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.found["calls"].append(pl_module.calls)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.found["calls"].append(pl_module.calls)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def fit(
    data: Path,
    layout: str,
    store: Path | None,
    *,
    module: dict[str, Any] | None = None,
    roles: dict[str, Any] | None = None,
    killed_at: tuple[int, int] = (-1, -1),
    notes: Notes | None = None,
    most_bytes: int = 1 << 30,
    settings: dict[str, Any] | None = None,
    **trainer: Any,
) -> dict[str, list[Any]]:
    """Trains two epochs; what `Notes` found."""
    notes = notes or Notes()
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(notes)
    chosen: dict[str, Any] = {"max_epochs": 2, "precision": "64-true", "callbacks": [notes], **trainer}
    trained = CountingVLM(**{"freeze_encoder": True, **(module or {})})
    trained.killed_at = killed_at
    kept = {} if store is None else {"keep_features": KeepFeatures(store, most_bytes)}
    try:
        strategy = {"roles": roles} if roles else {}
        runs = trainer_for(layout, strategy=strategy, default_root_dir=data.parent, **chosen)
        # In one order, since a media item's features differ in their last bits with what is encoded beside it.
        runs.fit(trained, datamodule=tiny_data(data, **{"shuffle": False, **kept, **(settings or {})}))
    finally:
        logger.removeHandler(notes)
    return notes.found


def train(folder: Path, *, data: str, layout: str, store: str, killed_at: Any = None, **settings: Any) -> None:
    """Trains without a store, with one, and with what the run before has kept; writes down what was found."""
    if killed_at is not None:
        fit(Path(data), layout, Path(store), killed_at=tuple(killed_at), **settings)
    found = {}
    for name, where in (("without", None), ("first", Path(store)), ("later", Path(store))):
        found[name] = fit(Path(data), layout, where, **settings)
    write_down(folder, found)
    disconnect_groups()
