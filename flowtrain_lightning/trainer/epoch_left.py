"""A ``fit`` that goes on begins in the epoch that another one left, or at the first batch of the next one."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import lightning as L

from flowtrain_lightning.checkpoint.loop_progress import (
    ended_in_mid_epoch,
    is_at_last_batch,
    is_between_epochs,
    settled_progress,
    with_batch_counted,
)
from flowtrain_lightning.data import FlowDataModule


class EpochLeft:
    """Remembers how far ``fit`` came in an epoch that ``max_steps`` or its like cut short."""

    def __init__(self) -> None:
        self._module: weakref.ref[L.LightningModule] | None = None
        self._progress: dict[str, Any] = {}
        self._position: dict[str, Any] = {}

    def remember(self, trainer: L.Trainer) -> None:
        """Called when ``fit`` has made its last step."""
        self._module = None
        data, progress = trainer.datamodule, trainer.fit_loop.state_dict()  # type: ignore[attr-defined]
        if isinstance(data, FlowDataModule) and ended_in_mid_epoch(progress):
            self._module = weakref.ref(trainer.lightning_module)
            self._progress, self._position = copy.deepcopy(progress), data.state_dict()

    def take_up(self, trainer: L.Trainer) -> None:
        """Called when a ``fit`` begins that goes on from no checkpoint: with the rest, if its data are the same."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        same = self._module is not None and self._module() is trainer.lightning_module
        if same and isinstance(data, FlowDataModule) and not data.differences(self._position):
            data.load_state_dict(self._position)
            trainer.fit_loop.load_state_dict(settled_progress(self._progress))
        self._module = None


def begin_next_epoch(trainer: L.Trainer) -> None:
    """Lets a run that goes on after a whole epoch begin the next one at its first batch.

    Called when training starts. Lightning forgets it where max_steps is given; and after a save in the hook of a last
    batch that it could not foresee, as that of a stream.
    """
    loop = trainer.fit_loop.epoch_loop
    if not loop.restarting:
        return
    progress = trainer.fit_loop.state_dict()
    if is_between_epochs(progress):
        loop.restarting = False
    elif loop.batch_progress.current.ready < trainer.num_training_batches and is_at_last_batch(progress):
        loop.restarting = False
        loop.on_load_checkpoint(with_batch_counted(loop.on_save_checkpoint()))  # it counts where it restarts alone
