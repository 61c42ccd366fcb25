"""From a module and its data to a profile: the halves are run alone on this device, and cost models fitted."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from flowtrain_lightning.allocator.roles import ROLES
from flowtrain_lightning.data import FlowDataModule, StepBatch
from flowtrain_lightning.packing.fit import Observation
from flowtrain_lightning.profiling.counting import count_flops
from flowtrain_lightning.profiling.errors import ProfileError
from flowtrain_lightning.profiling.fitting import plainest_cost
from flowtrain_lightning.profiling.halves import HalvesEngine, OptimizerClock
from flowtrain_lightning.profiling.origin import detached_copy, origin_of
from flowtrain_lightning.profiling.probes import Probe, load_probes
from flowtrain_lightning.profiling.profile import Flops, Profile, Reduction, RoleProfile
from flowtrain_lightning.profiling.reduction import measure_reduction
from flowtrain_lightning.runtime.halves import half_parameters

if TYPE_CHECKING:
    from flowtrain_lightning.module import FlowModule


_QUARTILE = 0.25
"""Of the times of one size, what is taken for its time: whatever else a machine does can only make it slower."""


def profile_module(
    module: FlowModule,
    data: FlowDataModule,
    *,
    accelerator: str = "auto",
    precision: Any = "32-true",
    seconds: float = 20.0,
    reduction: bool = True,
    flops: bool = False,
    progress: bool = True,
) -> Profile:
    """Measure the two halves of a module on one device of this machine, with real samples of several sizes.

    Each half computes as in training, with the threads that torch has in this process. The module itself is left as it
    is: a copy of it is built and run.

    Args:
        module: best not built yet.
        data: its training data are used.
        accelerator: as for the Trainer.
        precision: as for the Trainer.
        seconds: about how long to measure; every size is measured at least once.
        reduction: also measure how long two ranks take to sum gradients; on CPUs only.
        flops: also count the FLOPs of both halves, which takes some seconds more.
        progress: show a bar.

    Raises:
        DataError: there are no training data, or they cannot be read.
    """
    clock = OptimizerClock()
    with _quiet():
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=1,
            precision=precision,
            max_epochs=1,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    device = trainer.strategy.root_device
    data.prepare_data()
    data.setup("fit")
    reduced = _reduction() if reduction and device.type == "cpu" else None
    probes = load_probes(data)
    module = detached_copy(module)
    module.live_on(ROLES)
    engine = HalvesEngine(module, trainer, probes, clock, seconds=seconds, progress=progress)
    module.run_on(engine)
    with _quiet():
        trainer.fit(module, datamodule=_StandIn(data, _Repeated(probes[0].batch, engine.most_steps)))
    module.run_on(None)
    counted = _flops(trainer, module, probes) if flops else {}
    return Profile(
        origin_of(module, data, device, trainer.precision),
        {role: replace(_role_profile(module, engine, probes, role), flops=counted.get(role)) for role in ROLES},
        engine.feature_bytes,
        reduced,
    )


def _reduction() -> Reduction | None:
    try:
        return measure_reduction()
    except ProfileError as error:
        rank_zero_warn(f"{error} The profile says nothing about that.")
        return None


def _flops(trainer: L.Trainer, module: FlowModule, probes: Sequence[Probe]) -> dict[str, Flops]:
    try:
        with trainer.precision_plugin.forward_context():
            return count_flops(module, probes)
    except ProfileError as error:
        rank_zero_warn(f"{error} The profile says nothing about FLOPs.")
        return {}


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


def _role_profile(module: FlowModule, engine: HalvesEngine, probes: Sequence[Probe], role: str) -> RoleProfile:
    weights = half_parameters(module, role)
    trained = [weight for weight in weights if weight.requires_grad]
    typical = {probe: np.quantile(times, _QUARTILE, axis=0) for probe, times in engine.times[role].items()}
    measured = tuple(
        Observation.of(probes[probe].lengths(role), float(times.sum())) for probe, times in typical.items()
    )
    whole = float(np.sum(list(typical.values())))
    return RoleProfile(
        cost=plainest_cost(measured),
        trains=bool(trained),
        parameters=sum(weight.numel() for weight in weights),
        gradient_bytes=sum(weight.numel() * weight.element_size() for weight in trained),
        optimizer_seconds=float(np.quantile(engine.optimizer_times[role], _QUARTILE)) if trained and measured else 0.0,
        forward_share=float(sum(forward for forward, _ in typical.values())) / whole if measured else 1.0,
        measured=measured,
    )


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
