"""Runs the halves of one module under a Trainer of its own, and says how long each took."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np

from flowtrain_lightning.allocator.roles import ROLES
from flowtrain_lightning.data import FlowDataModule, StepBatch
from flowtrain_lightning.packing.step_plan import FloatArray
from flowtrain_lightning.profiling.halves import HalvesEngine, OptimizerClock
from flowtrain_lightning.profiling.probes import Probe

if TYPE_CHECKING:
    from flowtrain_lightning.module import FlowModule

_QUARTILE = 0.25
"""Of the times of one size, what is taken for its time: whatever else a machine does can only make it slower."""


@dataclass(frozen=True)
class Taken:
    """What the halves took.

    Attributes:
        passes: role -> number of the probe -> ``[2]`` seconds of forward and of backward.
        optimizer: role -> seconds of one optimizer step over this half alone.
        feature_bytes: of one row of features; 0 where no sample has media.
    """

    passes: Mapping[str, Mapping[int, FloatArray]]
    optimizer: Mapping[str, float]
    feature_bytes: int


def profiling_trainer(accelerator: str, precision: Any) -> L.Trainer:
    """A Trainer for one run of halves."""
    with _quiet():
        return L.Trainer(
            accelerator=accelerator,
            devices=1,
            precision=precision,
            max_epochs=1,
            callbacks=[OptimizerClock()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


def run_halves(
    module: FlowModule,
    trainer: L.Trainer,
    data: FlowDataModule,
    probes: Sequence[Probe],
    *,
    seconds: float,
    progress: bool,
) -> Taken:
    """Build the module and run its halves alone.

    Args:
        module: its weights will change.
        trainer: made by `profiling_trainer`, for this run only.
        data: which the module may ask for.
        probes: what is run.
        seconds: about how long to measure; every size is measured at least once.
        progress: show a bar.
    """
    clock = next(callback for callback in trainer.callbacks if isinstance(callback, OptimizerClock))  # type: ignore[attr-defined]
    module.set_local_roles(ROLES)
    engine = HalvesEngine(module, trainer, probes, clock, seconds=seconds, progress=progress)
    module.attach_runner(engine)
    with _quiet():
        trainer.fit(module, datamodule=_StandIn(data, _Repeated(probes[0].batch, engine.most_steps)))
    module.attach_runner(None)
    return Taken(
        passes={
            role: {probe: np.quantile(times, _QUARTILE, axis=0) for probe, times in of_role.items()}
            for role, of_role in engine.times.items()
        },
        optimizer={role: float(np.quantile(times, _QUARTILE)) for role, times in engine.optimizer_times.items()},
        feature_bytes=engine.feature_bytes,
    )


@dataclass(frozen=True)
class _Repeated:
    """A loader of one batch, over and over: the engine knows better what to do."""

    batch: StepBatch
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[StepBatch]:
        return repeat(self.batch, self.count)


class _StandIn(L.LightningDataModule):
    """The user's data module in all but its steps, since modules ask ``trainer.datamodule`` for this and that."""

    def __init__(self, data: FlowDataModule, steps: _Repeated) -> None:
        super().__init__()
        self._data = data
        self._steps = steps

    def train_dataloader(self) -> _Repeated:
        """As many steps as are wanted."""
        return self._steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's announcements and advice, which would be taken for those of the training."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        log.setLevel(level)
