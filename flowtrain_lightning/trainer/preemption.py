"""Ends all ranks together, with a checkpoint, after somebody asked the job to stop (SIGTERM)."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from flowtrain_lightning.runtime.job import Job
from flowtrain_lightning.runtime.runner import RoleRunner

PREEMPTION_CHECKPOINT = "preempted.ckpt"

LIGHTNINGS_BROADCAST = "_broadcast_sigterm_tensor"
"""Method of Lightning's loop over an epoch, which is private."""


class PreemptionCheckpoint(L.Callback):
    """Saves ``preempted.ckpt`` in the Trainer's root folder and ends ``fit`` in the same step on every rank.

    A validation is brought to its end first: Lightning cannot go on in the middle of one.

    The strategy adds it to every Trainer. A later ``fit(ckpt_path=".../preempted.ckpt")`` goes on from there. It is
    enough that one rank gets the signal. Under SLURM the signal that announces the end of the time does the same;
    the job is not queued again by itself. Outside of ``fit`` the signal ends the process, and so the job.

    Lightning's own handlers enter collectives inside the signal handler, where other ranks do not expect them. They
    are set after the strategy's setup, so this callback replaces them in the first hook after that; at the end
    Lightning puts back what was there before the run. What those handlers note Lightning broadcasts before each step,
    in the default group. Here nobody notes anything, and ranks would wait for encoder ranks that work ahead: so that
    broadcast, which has no public switch, is left out.

    Args:
        runner: knows after each step whether some rank was asked to end.
        job: learns that this rank was.
    """

    def __init__(self, runner: RoleRunner, job: Job) -> None:
        self._runner = runner
        self._job = job

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listens from here on."""
        self._listen(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listens from here on."""
        self._listen(trainer)
        setattr(trainer.fit_loop.epoch_loop, LIGHTNINGS_BROADCAST, lambda: None)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Outside of ``fit`` there is nothing to save."""
        if trainer.state.fn != TrainerFn.FITTING:
            _end_at_once()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """There is nothing to save."""
        _end_at_once()

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """There is nothing to save."""
        _end_at_once()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks at what all ranks agreed on in the step that just ended."""
        self._end_if_asked(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Looks at what all ranks agreed on in the steps of the validation that just ended."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._end_if_asked(trainer)

    def _end_if_asked(self, trainer: L.Trainer) -> None:
        if self._runner.stop_requested:
            path = Path(trainer.default_root_dir) / PREEMPTION_CHECKPOINT
            trainer.save_checkpoint(path)
            rank_zero_info(f"flowtrain: received SIGTERM; saved {path} and end after step {trainer.global_step}.")
            raise SIGTERMException

    def _listen(self, trainer: L.Trainer) -> None:
        signals = {signal.SIGTERM}
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            signals.add(environment.requeue_signal)
        if threading.current_thread() is threading.main_thread():  # signal.signal works in no other
            for number in signals:
                signal.signal(number, lambda *_: self._job.ask_to_stop())


def _end_at_once() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
