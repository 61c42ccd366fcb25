"""Puts the halves of this rank into their layouts, and the optimizers of those whose ranks share what these do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import lightning as L
import torch
from torch import nn
from torch.optim import Optimizer

from flowtrain_lightning.checkpoint.optimizer_state import NamedOptimizer
from flowtrain_lightning.compute.expert_padding import refuse_padding_beside_balance
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.packing.step_graph import any_binds
from flowtrain_lightning.parallel import HalfEngine, broadcast_half
from flowtrain_lightning.parallel.context_parallel import ContextParallelHalf
from flowtrain_lightning.parallel.deepspeed.deepspeed_half import DeepSpeedHalf
from flowtrain_lightning.parallel.experts.expert_parallel import experts_of
from flowtrain_lightning.parallel.halves import fill_half, half_tensors, without_absent_halves
from flowtrain_lightning.parallel.layouts import make_engine
from flowtrain_lightning.parallel.replicate import broadcast_copies
from flowtrain_lightning.parallel.role_groups import RoleGroups, make_groups
from flowtrain_lightning.parallel.tensor_parallel import TensorParallelHalf
from flowtrain_lightning.parallel.weight_marks import keeping_marks
from flowtrain_lightning.runtime.job import Job
from flowtrain_lightning.trainer.attention_heads import refuse_unshared_heads
from flowtrain_lightning.trainer.callback_refusals import refuse_averages_of_runs
from flowtrain_lightning.trainer.expert_refusals import refuse_undividable_experts
from flowtrain_lightning.trainer.optimizer_refusals import refuse_optimizers_of_shares
from flowtrain_lightning.trainer.refusals import (
    refuse_conditional_modules,
    refuse_frozen_backbone,
    refuse_layers_computed_again,
    refuse_precision_of_deepspeed,
    refuse_scalars_in_shards,
    refuse_sharded_before,
    refuse_sparse_gradients,
    refuse_unshared_sequences,
)
from flowtrain_lightning.trainer.stage_refusals import refuse_beside_stages


class HalfEngines:
    """The engines of one strategy's runs. Halves that an earlier run of it has sharded stay so."""

    def __init__(self) -> None:
        self._sharded: tuple[FlowModule, dict[str, HalfEngine]] | None = None
        self._optimizer_takers: Sequence[DeepSpeedHalf] = ()

    def make(self, module: FlowModule, trainer: L.Trainer, job: Job, device: torch.device) -> dict[str, HalfEngine]:
        """Role -> its layout, put onto the half, whose weights are this rank's then. Every rank calls it.

        Args:
            module: on ``device``, as far as it was built with weights.
            trainer: whose precision and callbacks count.
            job: says which roles this rank has.
            device: of this rank.

        Raises:
            ValueError: module or settings do not fit a layout; the message says what to do.
        """
        if self._sharded is None or self._sharded[0] is not module:
            _refuse_unfit(module, trainer, job)
            with keeping_marks(module):
                engines = _make(module, str(trainer.precision), job, device)
            module.mark_filled()
            if not any(engine.in_lockstep for engine in engines.values()) and not _some_keep(job):
                return engines
            self._sharded = module, engines
        for engine in self._sharded[1].values():
            if isinstance(engine, TensorParallelHalf | ContextParallelHalf):
                engine.begin_run()
        return self._sharded[1]

    def take_optimizers(
        self, engines: Mapping[str, HalfEngine], optimizers: Sequence[Optimizer], named: Sequence[NamedOptimizer]
    ) -> None:
        """Lets halves whose ranks share what the optimizer does take it.

        Raises:
            TypeError: an optimizer cannot step a run of a weight's elements.
        """
        takers = [engine for engine in engines.values() if isinstance(engine, DeepSpeedHalf)]
        self._optimizer_takers = [engine for engine in takers if engine.trains]
        for engine in self._optimizer_takers:
            refuse_optimizers_of_shares(optimizers)
            for optimizer, states in zip(optimizers, named, strict=True):
                states.share(engine.take_optimizer(optimizer))

    def release(self) -> None:
        """The run is over: optimizers that were taken are given back."""
        for engine in self._optimizer_takers:
            engine.release()


def move_halves(module: FlowModule, job: Job, device: torch.device) -> None:
    """Moves the halves that live on this rank to its device, as far as they are filled; others have nothing to move."""
    filled = [role for role in job.roles if role not in module.unfilled]
    in_stages = [role for role in filled if job.allocation.layouts[role].pipeline > 1]
    with keeping_marks(module), without_absent_halves(module, [role for role in filled if role not in in_stages]):
        module.to(device)
    for tensor in (each for role in in_stages for each in half_tensors(module, role)):
        tensor.data = tensor.data.to(device)


def _some_keep(job: Job) -> bool:
    """Whether other ranks of this one's default group keep halves in shards, so that this one must not make its anew.

    Who makes a half calls the group, and those would not come.
    """
    return job.allocation.placement == "mixed" and any_binds(job.allocation.meets)


def _refuse_unfit(module: FlowModule, trainer: L.Trainer, job: Job) -> None:
    layouts = job.allocation.layouts
    refuse_beside_stages(layouts, module, trainer)
    refuse_layers_computed_again(job.allocation, module)
    refuse_sharded_before(module)
    refuse_precision_of_deepspeed(layouts, str(trainer.precision))
    refuse_averages_of_runs(layouts, trainer.callbacks)  # type: ignore[attr-defined]
    refuse_frozen_backbone(layouts, module)
    refuse_scalars_in_shards(layouts, module)
    refuse_sparse_gradients(layouts, module)
    refuse_conditional_modules(layouts, module)
    refuse_undividable_experts(layouts, module)
    refuse_padding_beside_balance(module, trainer.datamodule)  # type: ignore[attr-defined]
    refuse_unshared_sequences(layouts, module)
    if job.allocation.trunk in job.roles:  # other ranks do not have the half that attends
        refuse_unshared_heads(layouts, module)


def _make(module: FlowModule, precision: str, job: Job, device: torch.device) -> dict[str, HalfEngine]:
    allocation = job.allocation
    groups = _make_groups(module, job, device.type)
    for role in job.roles:
        if role not in module.unfilled:
            broadcast_half(half_tensors(module, role), groups[role].all)

    def fill(role: str, keep: Callable[[nn.Parameter], None] | None) -> None:
        """Gives a half that was built without weights those of this rank, once it is in its layout."""
        if role in module.unfilled:
            on_host = allocation.offload.get(role) in ("weights", "all")
            fill_half(module, role, module.unfilled[role], device, on_host=on_host, keep=keep)
            broadcast_copies(half_tensors(module, role), groups[role].all, groups[role].replicas)

    for role, staged in module.staged.items():
        staged.column = groups[role].column
    return {
        role: make_engine(
            module,
            role,
            allocation.layouts[role],
            groups[role],
            recompute=allocation.recompute.get(role, "none"),
            # Within a limit each batch's activations leave by a choice of its own.
            offload="none" if allocation.activation_bytes is not None else allocation.offload.get(role, "none"),
            device_type=device.type,
            precision=precision,
            early=job.groups.role_cpu is None or allocation.placement == "separate",
            fill=partial(fill, role),
        )
        for role in job.roles
    }


def _make_groups(module: FlowModule, job: Job, device_type: str) -> dict[str, RoleGroups]:
    """Role -> its groups, also of a role that only other ranks of this one's default group have."""
    mixed = job.allocation.placement == "mixed"
    roles = job.roles if not mixed else job.allocation.roles
    return {
        role: make_groups(
            role,
            job.allocation.layouts[role],
            job.groups,
            device_type,
            waits_for_others=mixed and role != job.allocation.trunk,
            has_experts=bool(experts_of(map(module.get_submodule, module.halves[role]))),
        )
        for role in roles
    }
