"""A progress bar that also shows samples per second, how long the backbone waits, and for which data."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

from flowtrain_lightning.data import StepBatch
from flowtrain_lightning.runtime.timeline import STALL


class FlowProgressBar(TQDMProgressBar):
    """Lightning's bar with ``samples/s`` and ``stall``, the share of its time that rank 0's backbone lane waits.

    Where rank 0 waits for its loader it says so, with the share of its time, and how many more producers would do.
    """

    _started: float = 0.0
    _paused: float = 0.0
    _samples: int = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock."""
        super().on_train_start(trainer, pl_module)
        self._started, self._samples = time.monotonic(), 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Counts the step's samples."""
        self._samples += len(batch.plan.samples)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clock: validation is no training time."""
        super().on_validation_start(trainer, pl_module)
        self._paused = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock again."""
        super().on_validation_end(trainer, pl_module)
        self._started += time.monotonic() - self._paused

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Returns the figures behind the bar."""
        metrics: dict[str, Any] = {**super().get_metrics(trainer, pl_module)}
        metrics.pop("v_num", None)
        if trainer.training and self._samples:
            metrics["samples/s"] = f"{self._samples / (time.monotonic() - self._started):.0f}"
            pace = getattr(trainer.train_dataloader, "pace", None)
            if pace is not None and (bottleneck := pace.bottleneck) is not None:
                waits, share = bottleneck
                metrics[waits] = share
            runner = getattr(trainer.strategy, "runner", None)
            if runner is not None:
                metrics["stall"] = f"{100 * runner.timeline.share(runner.trunk, STALL):.0f}%"
        return metrics
