"""Logs how fast a run is, and what every rank spends its time, its memory and its part of the pool on."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn

from flowtrain_lightning.allocator import ROLES
from flowtrain_lightning.allocator.devices import maker_device
from flowtrain_lightning.data import StepBatch, StepLoader
from flowtrain_lightning.metrics import FlopUtilization, PackingUse, PlanMetric, Throughput
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.packing.cost_model import DEFAULT_COST
from flowtrain_lightning.placement.flop_counter import count_flops
from flowtrain_lightning.placement.meta_device import copy_on_meta
from flowtrain_lightning.placement.probes import load_probes
from flowtrain_lightning.placement.profile import ProfileError
from flowtrain_lightning.runtime.runner import RoleRunner

_EXPERT = re.compile(r"(?P<role>experts/.+) \d+ (?P<expert>expert \d+)")
"""What a rank tells of one expert, see `RankMetrics`."""


class FlowMonitor(L.Callback):
    """Sends metrics of all ranks to the Trainer's loggers, in groups, which Weights & Biases shows as sections.

    ``throughput/``, ``packing/`` and ``mfu/`` are of all ranks together, and there under plain Lightning too; see
    `flowtrain_lightning.metrics`. ``time/`` has for every lane the shares of compute, stall and communication in its
    time; ``data/`` for every rank the share of its time in which it waits for its loader, and how many more producers
    would make its steps at its pace; ``pool/`` for every rank what its part of the pool does; ``memory/`` the most
    bytes that it has had; ``experts/`` how often tokens of all ranks chose each expert of a mixture, over the mean, in
    all layers (not where layers are compiled); and where ranks share them, the rows that those of a rank compute, those
    dropped (none), the fullest expert's over the mean of its layer there, and the fullest rank's over the mean. No rank
    waits for another one to tell its metrics: those of encoder ranks may be of some steps before.

    Args:
        every_n_steps: steps between two reports; None takes the Trainer's ``log_every_n_steps``.
        peak_flops: FLOP/s of one device on paper, by which ``mfu/`` is measured; None takes those of the known GPUs,
            and leaves it out on others, and for several encoders or a generator under plain Lightning. To count what a
            model computes takes rank 0 some seconds before the first step.

    Raises:
        ValueError: fewer than 1 step, or a peak that is not above 0.
    """

    def __init__(self, every_n_steps: int | None = None, peak_flops: float | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; it must be at least 1.")
        if peak_flops is not None and peak_flops <= 0:
            raise ValueError(f"peak_flops is {peak_flops}; it must be above 0.")
        self.every_n_steps = every_n_steps
        self.peak_flops = peak_flops
        self._metrics: dict[str, PlanMetric] = {}
        self._whole: FlowModule | None = None
        self._step_ended = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Keeps a copy without memory of the module as it is built, before ranks share its weights."""
        is_told = trainer.is_global_zero and _peak_of(trainer, self.peak_flops) is not None
        if stage == "fit" and is_told and isinstance(pl_module, FlowModule) and not list(pl_module.parameters()):
            with suppress(Exception):  # of the user's code, where it needs what weights hold; then the built one counts
                self._whole = copy_on_meta(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Has the metrics of ranks told in the steps' reports, and counts FLOPs."""
        runner: RoleRunner | None = getattr(trainer.strategy, "runner", None)
        if runner is not None:
            runner.metrics_every = math.gcd(runner.metrics_every, self._every(trainer))
        if trainer.is_global_zero:
            whole, self._whole = self._whole, None
            self._metrics = _packing_metrics(trainer) | _utilization(trainer, pl_module, self.peak_flops, whole)
        self._step_ended = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Takes in the step; every so many steps, rank 0 logs what all ranks told."""
        seconds, self._step_ended = time.monotonic() - self._step_ended, time.monotonic()
        for metric in self._metrics.values():
            metric.update(batch.plan, seconds)
        every = self._every(trainer)
        if not every or trainer.global_step % every or not trainer.is_global_zero:
            return
        found = {
            f"{group}/{name}": float(value)
            for group, metric in self._metrics.items()
            for name, value in metric.compute().items()
        }
        runner: RoleRunner | None = getattr(trainer.strategy, "runner", None)
        told = [] if runner is None else [note["metrics"] for note in runner.report.notes if "metrics" in note]
        if runner is None and isinstance(loader := trainer.train_dataloader, StepLoader):
            found |= loader.pace.metrics("rank 0")
        for of_rank in told:
            found |= {name: value for name, value in of_rank.items() if not _EXPERT.fullmatch(name)}
        found |= _fullest_ranks(found) | _fullness_of_experts(told)
        for metric in self._metrics.values():
            metric.reset()
        for logger in trainer.loggers:
            logger.log_metrics(found, step=trainer.global_step - 1)  # beside the step's own loss, counted from 0

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validation is no training time."""
        self._step_ended = time.monotonic()

    def _every(self, trainer: L.Trainer) -> int:
        return self.every_n_steps or int(trainer.log_every_n_steps)  # type: ignore[attr-defined]


def _fullest_ranks(found: Mapping[str, float]) -> dict[str, float]:
    """By role the rows of the rank whose experts computed most of them, over the mean of all ranks."""
    of_roles: dict[str, list[float]] = {}
    for name, value in found.items():
        if name.startswith("experts/") and name.endswith(" rows"):
            of_roles.setdefault(name.rsplit(" ", 2)[0], []).append(value)
    return {f"{role} fullest rank": max(rows) * len(rows) / max(sum(rows), 1) for role, rows in of_roles.items()}


def _fullness_of_experts(told: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """By role and expert how often tokens of all ranks chose it, over the mean of all experts of the role."""
    chosen: dict[str, dict[str, float]] = {}
    for name, value in (item for of_rank in told for item in of_rank.items()):
        if (found := _EXPERT.fullmatch(name)) is not None:
            of_role = chosen.setdefault(found["role"], {})
            of_role[found["expert"]] = of_role.get(found["expert"], 0.0) + value
    return {
        f"{role} {expert}": value * len(experts) / max(sum(experts.values()), 1)
        for role, experts in chosen.items()
        for expert, value in experts.items()
    }


def _packing_metrics(trainer: L.Trainer) -> dict[str, PlanMetric]:
    """Throughput, and what packing leaves unused, where a FlowDataModule packs."""
    loader = trainer.train_dataloader
    if not isinstance(loader, StepLoader):
        return {"throughput": Throughput()}
    steps, members = loader.steps, loader.steps.shard.members
    use = PackingUse(
        steps.packing.token_budget,
        steps.pad_to_budget,
        dict.fromkeys(members.graph.roles, DEFAULT_COST)
        | dict(steps.packing.media_costs)
        | {members.trunk: steps.packing.cost},
    )
    return {"throughput": Throughput(), "packing": use}


def _utilization(
    trainer: L.Trainer, module: L.LightningModule, peak: float | None, whole: FlowModule | None
) -> dict[str, PlanMetric]:
    """MFU, where the peak is known and the module's FLOPs can be counted.

    Args:
        trainer: about to train.
        module: as it lies on this rank.
        peak: as it was given.
        whole: the module before ranks shared its weights; None where that is not known.
    """
    peak = _peak_of(trainer, peak)
    data = trainer.datamodule  # type: ignore[attr-defined]
    if peak is None or data is None or not isinstance(module, FlowModule):
        return {}
    allocation = getattr(trainer.strategy, "allocation", None)
    graph, everyone = module.role_graph, tuple(range(trainer.world_size))
    if allocation is None and set(graph.roles) != set(ROLES):
        return {}  # plans of plain Lightning do not tell encoders apart
    ranks = dict.fromkeys(graph.roles, everyone) if allocation is None else allocation.ranks
    if whole is not None:
        trained = {name: weight.requires_grad for name, weight in module.named_parameters()}  # callbacks may freeze
        for name, weight in whole.named_parameters():
            weight.requires_grad_(trained.get(name, weight.requires_grad))
    module.attach_runner(None)  # what is counted is a copy of the module, which must not take the whole run along
    try:
        with trainer.precision_plugin.forward_context():
            return {
                "mfu": FlopUtilization(
                    count_flops(module if whole is None else whole, load_probes(data, graph)), ranks, peak
                )
            }
    except ProfileError as error:
        rank_zero_warn(f"{error} FlowMonitor says nothing about MFU.")
        return {}
    finally:
        module.attach_runner(getattr(trainer.strategy, "runner", None))


def _peak_of(trainer: L.Trainer, given: float | None) -> float | None:
    """FLOP/s on paper of this rank's GPU, in the precision of the run, if no other one is given."""
    if given is not None:
        return given
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    known = maker_device(torch.cuda.get_device_name(device))
    shared = getattr(trainer.strategy, "ranks_per_device", 1)
    width = 2 if "16" in str(trainer.precision) else 4
    return None if known is None else known.peak_for(width) / shared
