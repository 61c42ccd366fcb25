"""Records by PyTorch's profiler what chosen ranks do in chosen steps, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile

from flowtrain_lightning.data import StepBatch
from flowtrain_lightning.runtime.job import Job

_MEMORY_EVENTS = 200_000


class StepProfiler(L.Callback):
    """Saves ``profile/rank<r>.json`` of each chosen rank, a trace that Perfetto (https://ui.perfetto.dev) opens.

    It shows every operation and kernel, where `TimelineRecorder` shows every batch. Steps that are recorded take
    longer. Begin behind the first ones, in which memory is still found and kernels are chosen.

    Args:
        first: the first step that is recorded, counted from 0.
        steps: how many are.
        roles: ranks that have one of these are recorded; under plain Lightning, and with None, all ranks are.
        memory: on GPUs, saves ``profile/memory<r>.pickle`` too, which https://pytorch.org/memory_viz draws: what was
            allocated when and by whom, from the first of these steps to the last.
        folder: where ``profile/`` goes; by default the logger's folder.

    Raises:
        ValueError: no steps, or no role.
    """

    def __init__(
        self,
        first: int = 5,
        steps: int = 2,
        roles: Sequence[str] | None = None,
        memory: bool = False,
        folder: str | Path | None = None,
    ) -> None:
        if first < 0 or steps < 1:
            raise ValueError(f"first is {first} and steps is {steps}; first must be at least 0, and steps at least 1.")
        if roles is not None and not roles:
            raise ValueError(f"roles is {roles!r}; name some of the module's halves, or leave it out for all ranks.")
        self.first = first
        self.steps = steps
        self.roles = None if roles is None else frozenset(roles)
        self.memory = memory
        self.folder = None if folder is None else Path(folder)
        self._running: profile | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Agrees on the folder.

        Raises:
            ValueError: an unknown role.
        """
        job: Job | None = getattr(trainer.strategy, "job", None)
        if job is not None and self.roles is not None and not self.roles <= set(job.allocation.roles):
            raise ValueError(f"roles is {sorted(self.roles)}; name some of {', '.join(job.allocation.roles)}.")
        folder = trainer.strategy.broadcast(str(self.folder or trainer.log_dir or trainer.default_root_dir))
        self._to = Path(folder) / "profile"

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: StepBatch, batch_idx: int
    ) -> None:
        """Begins with the first chosen step."""
        if trainer.global_step != self.first or not self._is_chosen(trainer):
            return
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if self.memory and on_gpu:
            # The documented way to look at a GPU's memory, though its name has an underscore.
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._running = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            record_shapes=True,
            profile_memory=self.memory,
        )
        self._running.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Ends after the last one, and writes."""
        if trainer.global_step >= self.first + self.steps:
            self._write(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes what there is of a run that ends sooner."""
        self._write(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stops recording."""
        self._stop()

    def _is_chosen(self, trainer: L.Trainer) -> bool:
        job: Job | None = getattr(trainer.strategy, "job", None)
        return job is None or self.roles is None or not self.roles.isdisjoint(job.roles)

    def _write(self, trainer: L.Trainer) -> None:
        on_gpu, rank = trainer.strategy.root_device.type == "cuda", trainer.global_rank
        recorded = self._running
        if recorded is None:
            return
        self._to.mkdir(parents=True, exist_ok=True)
        if self.memory and on_gpu:
            torch.cuda.memory._dump_snapshot(str(self._to / f"memory{rank}.pickle"))  # type: ignore[no-untyped-call]
        self._stop()
        recorded.export_chrome_trace(str(self._to / f"rank{rank}.json"))

    def _stop(self) -> None:
        if self._running is None:
            return
        self._running.stop()
        self._running = None
        if self.memory and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
