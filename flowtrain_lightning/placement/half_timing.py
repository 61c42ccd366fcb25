"""Times each half of a module, run alone under a Trainer, by the calls that training makes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeVar

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm  # type: ignore[import-untyped]

from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.compute.feature_spec import as_features
from flowtrain_lightning.compute.quiet_lightning import quiet_lightning
from flowtrain_lightning.compute.whole_module import WholeModuleRunner
from flowtrain_lightning.data import Features, FlowDataModule, PackedMedia, PackedTargets, StepBatch
from flowtrain_lightning.data.batch import IGNORED_LABEL
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.parallel.halves import half_parameters, half_trains
from flowtrain_lightning.parallel.ranks.random_streams import global_seed, own_streams
from flowtrain_lightning.placement.probes import Probe

Result = TypeVar("Result")

_WARM_UPS = 1
"""Rounds over all probes that do not count: what is done once in a run only is done there."""
_ROUNDS = 7
"""Rounds that count, unless time is up."""
_OPTIMIZER_STEPS = 5
_QUARTILE = 0.25
"""Of the times of one size, what is taken for its time: whatever else a machine does can only make it slower."""


@dataclass(frozen=True)
class HalfTimes:
    """The times of the halves.

    Attributes:
        passes: role -> number of the probe -> ``[2]`` seconds of forward and of backward.
        optimizer: role -> seconds of one optimizer step over this half alone.
        feature_bytes: of one row of features, the largest; 0 where no sample has media.
    """

    passes: Mapping[str, Mapping[int, FloatArray]]
    optimizer: Mapping[str, float]
    feature_bytes: int


def profiling_trainer(accelerator: str, precision: Any, device: int | None = None) -> L.Trainer:
    """A Trainer for one run of `time_halves`, on the device of this number where there are several."""
    with quiet_lightning():
        return L.Trainer(
            accelerator=accelerator,
            devices=1 if device is None else [device],
            precision=precision,
            max_epochs=1,
            callbacks=[OptimizerClock()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


def time_halves(
    module: FlowModule,
    trainer: L.Trainer,
    data: FlowDataModule,
    probes: Sequence[Probe],
    *,
    seconds: float,
    progress: bool,
) -> HalfTimes:
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
    module.set_local_roles(module.role_graph.roles)
    runner = HalfRunner(module, trainer, probes, clock, seconds=seconds, progress=progress)
    module.attach_runner(runner)
    with quiet_lightning():
        trainer.fit(module, datamodule=_StandIn(data, _SameBatch(probes[0].batch, runner.most_steps)))
    module.attach_runner(None)
    return HalfTimes(
        passes={
            role: {probe: np.quantile(times, _QUARTILE, axis=0) for probe, times in of_role.items()}
            for role, of_role in runner.times.items()
        },
        optimizer={role: float(np.quantile(times, _QUARTILE)) for role, times in runner.optimizer_times.items()},
        feature_bytes=runner.feature_bytes,
    )


class OptimizerClock(L.Callback):
    """Times the optimizer, and leaves out what may wait for a metric of the validation.

    Attributes:
        seconds: of the last step's optimizer.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves out schedulers, and callbacks that the module brings."""
        trainer.strategy.lr_scheduler_configs = []
        trainer.callbacks = [self]  # type: ignore[attr-defined]

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """All gradients are there."""
        self._start = now(trainer.strategy.root_device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """The optimizer has run."""
        self.seconds = now(trainer.strategy.root_device) - self._start


class HalfRunner(WholeModuleRunner):
    """Fills the steps of a Trainer: with one probe each, and at last with one half's optimizer step each.

    Probes take turns in rounds, so that a slow moment of the machine does not hit one size alone. Gradients add up in
    memory that is there already, as they do in all microbatches of a step but the first.

    Args:
        module: which the Trainer will build; its weights will change.
        trainer: decides device and precision.
        probes: what is measured.
        clock: one of the Trainer's callbacks.
        seconds: after which no further round begins, once every probe has been measured.
        progress: show a bar.

    Attributes:
        times: role -> number of the probe -> seconds of forward and of backward, of every round that counts.
        optimizer_times: role -> seconds of the optimizer's steps over this half alone.
        feature_bytes: of one row of features, the largest; 0 until one was computed.
    """

    def __init__(
        self,
        module: FlowModule,
        trainer: L.Trainer,
        probes: Sequence[Probe],
        clock: OptimizerClock,
        *,
        seconds: float,
        progress: bool,
    ) -> None:
        super().__init__(module, trainer)
        roles = self._graph.roles
        self.times: dict[str, dict[int, list[tuple[float, float]]]] = {role: defaultdict(list) for role in roles}
        self.optimizer_times: dict[str, list[float]] = {role: [] for role in roles}
        self.feature_bytes = 0
        self._device = trainer.strategy.root_device
        self._probes = probes
        self._clock = clock
        self._seconds = seconds
        self._progress = progress
        self._work = self._all_work()

    @property
    def most_steps(self) -> int:
        """Steps that all work needs where time is not up before."""
        return (_WARM_UPS + _ROUNDS) * len(self._probes) + len(self._graph.roles) * _OPTIMIZER_STEPS + 1

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """The next piece of work; the batch is not looked at."""
        if next(self._work, None) is None:
            self.trainer.should_stop = True
        return torch.zeros((), device=self._device)

    def _all_work(self) -> Iterator[bool]:
        """True after each piece of work."""
        bar = tqdm(total=self.most_steps, desc="Profiling", unit="step", leave=False, disable=not self._progress)
        start = time.monotonic()
        with bar:
            for number in range(_WARM_UPS + _ROUNDS):
                if number > _WARM_UPS and time.monotonic() - start > self._seconds:
                    break
                for probe in range(len(self._probes)):
                    with own_streams():
                        self._run(probe, counts=number >= _WARM_UPS)
                    bar.update()
                    yield True
            roles = self._graph.roles
            gradients = [(weight, weight.grad) for role in roles for weight in half_parameters(self._module, role)]
            for role in roles:
                self._keep_gradients_of(role, gradients)
                for _ in range(_OPTIMIZER_STEPS):
                    bar.update()
                    yield True
                    self.optimizer_times[role].append(self._clock.seconds)

    def _keep_gradients_of(self, role: str, gradients: list[tuple[nn.Parameter, Tensor | None]]) -> None:
        """An optimizer passes over parameters without gradients."""
        kept = {id(weight) for weight in half_parameters(self._module, role)}
        for weight, gradient in gradients:
            weight.grad = gradient if id(weight) in kept else None

    def _run(self, probe: int, counts: bool) -> None:
        self._module.zero_grad(set_to_none=False)
        for role, seconds in self._run_halves(self._probes[probe]).items():
            if counts:
                self.times[role][probe].append(seconds)
        targets = int((self._probes[probe].packed.labels != IGNORED_LABEL).sum())
        for engine in self._engines.values():
            engine.finish_gradients(1 / max(targets, 1))

    def _run_halves(self, probe: Probe) -> dict[str, tuple[float, float]]:
        """Role -> seconds of forward and of backward. The halves share no graph, as if they lived on two ranks."""
        packed, step = probe.packed, (probe.batch.epoch, probe.batch.step)
        features: Features = {}
        encoded: dict[str, tuple[float, tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        for role in filter(probe.media.__contains__, self._graph.producers):
            media = probe.media[role]
            seconds, outputs, leaves = self._encode(role, media, step)
            encoded[role] = seconds, outputs, leaves
            features |= as_features(media.modality, leaves)
        trunk = self._graph.trunk
        (loss, rows), forward = self._timed(
            lambda: self._compute.microbatch_and_rows(packed, features, stage="train", step=step, number=0)
        )
        read = tuple(row.detach().requires_grad_(row.requires_grad) for row in rows)
        generated = {role: self._generate(role, probe, read) for role in self._graph.behind if role in probe.media}
        seeds = (torch.ones_like(loss), *(row.grad for row in read))
        found = {**generated, trunk: (forward, self._backward(trunk, (loss, *rows), seeds))}
        for role, (seconds, outputs, leaves) in encoded.items():
            found[role] = seconds, self._backward(role, outputs, tuple(leaf.grad for leaf in leaves))
        return found

    def _encode(
        self, role: str, media: PackedMedia, step: tuple[int, int]
    ) -> tuple[float, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Seconds of a forward, its outputs, and the same without their graph, for the trunk to read."""
        trains = half_trains(self._module, role)
        with torch.set_grad_enabled(trains):
            outputs, seconds = self._timed(lambda: self._compute.encode(role, media, step=step, number=0))
        row_bytes = sum(out[0].numel() * out.element_size() for out in outputs)
        self.feature_bytes = max(self.feature_bytes, row_bytes)
        leaves = tuple(out.detach().requires_grad_(trains and out.is_floating_point()) for out in outputs)
        return seconds, outputs, leaves

    def _generate(self, role: str, probe: Probe, rows: tuple[Tensor, ...]) -> tuple[float, float]:
        """Seconds of a forward and of a backward, after which the rows have their gradients."""
        items = PackedTargets(probe.media[role], global_seed(), probe.batch.epoch, probe.batch.step)
        loss, forward = self._timed(lambda: self._compute.generate(role, items, rows, stage="train", number=0))
        return forward, self._backward(role, (loss,), (torch.ones_like(loss),))

    def _backward(self, role: str, outputs: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> float:
        pairs = zip(outputs, gradients, strict=True)
        if not any(out.requires_grad and gradient is not None for out, gradient in pairs):
            return 0.0
        return self._timed(lambda: self._compute.backward(role, outputs, gradients, last=True))[1]

    def _timed(self, run: Callable[[], Result]) -> tuple[Result, float]:
        start = now(self._device)
        result = run()
        return result, now(self._device) - start


def now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done what it was asked: a GPU computes after the call has returned."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class _SameBatch:
    """A loader of one batch, over and over: the runner knows better what to do."""

    batch: StepBatch
    steps: int

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[StepBatch]:
        return repeat(self.batch, self.steps)


class _StandIn(L.LightningDataModule):
    """The user's data module in all but its steps, since modules ask ``trainer.datamodule`` for this and that."""

    def __init__(self, data: FlowDataModule, steps: _SameBatch) -> None:
        super().__init__()
        self._data = data
        self._steps = steps

    def train_dataloader(self) -> _SameBatch:
        """As many steps as are wanted."""
        return self._steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)
