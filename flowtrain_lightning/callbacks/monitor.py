"""Logs what every rank spends its time on and what its part of the pool does."""

from __future__ import annotations

import math
from typing import Any

import lightning as L

from flowtrain_lightning.data import StepBatch
from flowtrain_lightning.runtime.runner import RoleRunner


class FlowMonitor(L.Callback):
    """Sends metrics of all ranks to the Trainer's loggers, as ``flowtrain/encoder 0/stall``.

    For every lane: the shares of ``compute``, ``stall`` and ``communication`` in its time. For every rank:
    ``pool_put`` and ``pool_read`` in bytes per second, ``pool_waiting`` and ``pool_peak`` as shares, and how often an
    entry was refused since there was no room. No rank waits for another one to tell its metrics: those of encoder
    ranks may be of some steps before.

    Args:
        every_n_steps: steps between two reports; None takes the Trainer's ``log_every_n_steps``.

    Raises:
        ValueError: fewer than 1 step.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; it must be at least 1.")
        self.every_n_steps = every_n_steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Has the metrics told in the steps' reports."""
        runner: RoleRunner | None = getattr(trainer.strategy, "runner", None)
        if runner is not None:
            runner.metrics_every = math.gcd(runner.metrics_every, self._every(trainer))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Every so many steps, rank 0 logs what all ranks told."""
        runner: RoleRunner | None = getattr(trainer.strategy, "runner", None)
        every = self._every(trainer)
        if runner is None or not every or trainer.global_step % every or not trainer.is_global_zero:
            return
        told = [note["metrics"] for note in runner.report.notes if "metrics" in note]
        metrics = {f"flowtrain/{name}": value for of_rank in told for name, value in of_rank.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)  # beside the step's own loss, counted from 0

    def _every(self, trainer: L.Trainer) -> int:
        return self.every_n_steps or int(trainer.log_every_n_steps)  # type: ignore[attr-defined]
