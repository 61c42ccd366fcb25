"""Ends all ranks together, with a checkpoint, after somebody asked the job to stop (SIGTERM)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

if TYPE_CHECKING:
    from flowtrain_lightning.strategy import FlowTrainStrategy

PREEMPTION_CHECKPOINT = "preempted.ckpt"


class PreemptionCheckpoint(L.Callback):
    """Saves ``preempted.ckpt`` in the Trainer's root folder and ends ``fit`` in the same step on every rank.

    The strategy adds it to every ``fit``. A later ``fit(ckpt_path=".../preempted.ckpt")`` goes on from there.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks at what all ranks agreed on in the step that just ended."""
        strategy: FlowTrainStrategy = trainer.strategy  # type: ignore[assignment]
        if strategy.engine.stop_requested:
            path = Path(trainer.default_root_dir) / PREEMPTION_CHECKPOINT
            trainer.save_checkpoint(path)
            rank_zero_info(f"flowtrain: received SIGTERM; saved {path} and end after step {trainer.global_step}.")
            raise SIGTERMException
