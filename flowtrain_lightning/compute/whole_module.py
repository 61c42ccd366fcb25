"""The whole module on every rank: what a step does under plain Lightning (``strategy="auto"`` and ``"ddp"``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.compute.expert_padding import refuse_padding_beside_balance
from flowtrain_lightning.compute.feature_spec import as_features
from flowtrain_lightning.compute.joint_losses import JointLosses, WeighedModule
from flowtrain_lightning.compute.shared_features import SharedFeatures
from flowtrain_lightning.compute.step_metrics import StepReport
from flowtrain_lightning.compute.user_methods import UserMethods
from flowtrain_lightning.data import Features, PackedTargets, StepBatch
from flowtrain_lightning.parallel import ReplicatedHalf, squared_norm
from flowtrain_lightning.parallel.experts.expert_counts import balance_experts, counting_choices
from flowtrain_lightning.parallel.halves import HalvedModule, half_parameters
from flowtrain_lightning.parallel.ranks.random_streams import global_seed, own_streams
from flowtrain_lightning.parallel.ranks.sealed_messages import gather_over


class WholeModule(UserMethods, WeighedModule, Protocol):
    """The methods of a module that a runner of both halves calls; `FlowModule` has them."""

    def zero_grad(self, set_to_none: bool = ...) -> None:
        """As of `torch.nn.Module`."""

    def modules(self) -> Iterator[nn.Module]:
        """As of `torch.nn.Module`."""

    def log_report(self, stage: str, report: StepReport) -> Tensor:
        """Logs a step's report, and returns its mean loss."""


class _Loss(NamedTuple):
    """Summed losses, and the gradient of them."""

    loss: Tensor
    seed: Tensor


class WholeModuleRunner:
    """One backward per microbatch through both halves; gradients are summed once, after the last microbatch.

    Attributes:
        trainer: whose steps it runs.
    """

    def __init__(self, module: WholeModule, trainer: L.Trainer) -> None:
        refuse_groups_of_roles(trainer)
        refuse_loss_scale(trainer)
        refuse_padding_beside_balance(module, trainer.datamodule)  # type: ignore[attr-defined]
        self.trainer = trainer
        self._module = module
        self._graph = module.role_graph
        self._losses = JointLosses(module)
        self._engines = {role: ReplicatedHalf(half_parameters(module, role)) for role in self._graph.roles}
        self._compute = Compute(module, trainer, trainer.strategy.root_device, self._engines)
        self._no_sync = ExitStack()

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """All microbatches forward and backward; returns the mean loss over target tokens, detached."""
        refuse_accumulation(self.trainer)
        refuse_all_frozen(self._module)
        self._silence_ddp()
        self._forget("train")
        self._module.zero_grad(set_to_none=True)
        for engine in self._engines.values():
            engine.begin_step()
        final = max((n for n, packed in enumerate(batch.microbatches) if packed is not None), default=-1)
        shared = self._shared_features(batch)
        with own_streams():
            for number in range(len(batch.microbatches)):
                with counting_choices(True):
                    losses_of = self._losses_of(batch, number, "train", shared)
                seeded = [each for each in losses_of if each.loss.requires_grad]
                if seeded:
                    losses = tuple(each.loss for each in seeded)
                    seeds = tuple(each.seed for each in seeded)
                    self._compute.backward(self._graph.trunk, losses, seeds, last=number == final)
                if shared is not None:
                    shared.give_back(number)
        report = self._agree("train")
        self._losses.refuse_other_counts(batch.plan, report, self._compute.patch_dims)
        for engine in self._engines.values():
            engine.finish_gradients(self._losses.scale(report))
        balance_experts(self._module.modules(), self._sum)
        return self._module.log_report("train", report)

    def evaluation_step(self, batch: StepBatch, batch_idx: int, stage: str) -> Tensor:
        """All microbatches forward, without gradients; returns the mean loss over target tokens."""
        self._forget(stage)
        shared = self._shared_features(batch)
        with own_streams():
            for number in range(len(batch.microbatches)):
                self._losses_of(batch, number, stage, shared)
        return self._module.log_report(stage, self._agree(stage))

    def predict_step(self, batch: StepBatch, batch_idx: int) -> list[Any]:
        """Returns the results of ``backbone_step`` for each microbatch."""
        shared, numbers = self._shared_features(batch), range(len(batch.microbatches))
        with own_streams():
            outputs = [self._microbatch(batch, number, "predict", shared)[0] for number in numbers]
        self._compute.end_step()
        return [output for output in outputs if output is not None]

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The 2-norm of all gradients."""
        return squared_norm([p.grad for p in parameters if p.grad is not None]).sqrt()

    def agree_on_logged(self, name: str, value: Any) -> Any:
        """The value itself: under plain Lightning every rank has results of its own."""
        return value

    def _microbatch(
        self, batch: StepBatch, number: int, stage: str, shared: SharedFeatures | None
    ) -> tuple[Any, tuple[Tensor, ...]]:
        packed = batch.microbatches[number]
        if packed is None:
            return None, ()
        step = batch.epoch, batch.step
        features = self._features(batch, number) if shared is None else shared.of(number)
        return self._compute.microbatch_and_rows(packed, features, stage=stage, step=step, number=self._stream(number))

    def _losses_of(self, batch: StepBatch, number: int, stage: str, shared: SharedFeatures | None) -> list[_Loss]:
        """The losses of one microbatch, and of what is generated from its rows."""
        loss, rows = self._microbatch(batch, number, stage, shared)
        if loss is None:
            return []
        found, first = [_Loss(loss, self._losses.gradient(loss, batch.plan, self._graph.trunk))], 0
        for index, media in batch.read_by(number):
            if media.modality not in self._graph.generated:
                continue
            items = PackedTargets(media, global_seed(), batch.epoch, batch.step)
            end = first + sum(items.condition_rows)
            condition, first = tuple(each[first:end] for each in rows), end
            (role,) = self._graph.behind
            generated = self._compute.generate(role, items, condition, stage=stage, number=self._stream(index))
            patch_dim = self._compute.patch_dims[role]
            found.append(_Loss(generated, self._losses.gradient(generated, batch.plan, role, patch_dim)))
        return found

    def _forget(self, stage: str) -> None:
        """Drops what a step that has failed left of its losses and metrics."""
        self._compute.metrics[stage].clear()
        for role in self._graph.behind:
            self._compute.metrics_behind[role][stage].clear()

    def _shared_features(self, batch: StepBatch) -> SharedFeatures | None:
        """The features of a step whose samples have media items in common; None where each microbatch has its own."""
        if batch.plan.encoded_as is None:
            return None
        return SharedFeatures(self._compute, self._graph, batch, self._stream)

    def _features(self, batch: StepBatch, number: int) -> Features:
        """The features that a microbatch reads: those of its encoder batches of one modality, one after another."""
        encoded: dict[str, list[tuple[Tensor, ...]]] = {}
        for index, media in batch.read_by(number):
            if media.modality in self._graph.generated:
                continue
            role, stream = self._graph.producer_of(media.modality), self._stream(index)
            found = self._compute.encode(role, media, step=(batch.epoch, batch.step), number=stream)
            encoded.setdefault(media.modality, []).append(found)
        features: Features = {}
        for modality, parts in encoded.items():
            joined = parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))
            features |= as_features(modality, joined)
        return features

    def _stream(self, number: int) -> int:
        """The random stream of this rank's microbatch or encoder batch of that number."""
        return number * self.trainer.world_size + self.trainer.global_rank

    def _sum(self, counts: Tensor) -> None:
        if dist.is_initialized():
            dist.all_reduce(counts)

    def _agree(self, stage: str) -> StepReport:
        self._compute.end_step()
        device = self._compute.device if dist.is_initialized() and dist.get_backend() == "nccl" else None
        sums = _sum_over_ranks(device), _gather_over_ranks(device)
        of_trunk = self._compute.metrics[stage].agree(False, *sums)
        behind = {role: self._compute.metrics_behind[role][stage].agree(False, *sums) for role in self._graph.behind}
        return self._losses.joined(of_trunk, behind)

    def _silence_ddp(self) -> None:
        # Under DDP Lightning calls this step inside DDP's forward. The step sums gradients itself, so DDP's own
        # reduction stays off from here to the end of the run; `no_sync` is DDP's public switch.
        wrapped = self.trainer.strategy.model
        if isinstance(wrapped, DistributedDataParallel) and wrapped.require_backward_grad_sync:
            self._no_sync.enter_context(wrapped.no_sync())


def refuse_accumulation(trainer: L.Trainer) -> None:
    """Raises where Lightning would accumulate over steps, since every step starts with gradients of its own.

    Raises:
        ValueError: says what was given and what to set instead.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) was given, but a FlowModule's step "
            "already accumulates over its microbatches. Leave it at 1 and raise FlowDataModule(token_steps=...) or "
            "FlowDataModule(global_batch_size=...)."
        )


def refuse_all_frozen(module: HalvedModule) -> None:
    """Raises where `fit` would change nothing.

    Raises:
        ValueError: says what to do.
    """
    if not any(weight.requires_grad for _, weight in module.named_parameters()):
        raise ValueError(
            f"All weights of {type(module).__name__} are frozen, so that fit would train nothing. Leave "
            "requires_grad_(True) on what is to train, add adapters, or call Trainer.validate or predict."
        )


def refuse_loss_scale(trainer: L.Trainer) -> None:
    """Raises where Lightning would divide gradients by a scale with which it has not multiplied the loss.

    Raises:
        ValueError: says what was given and what to do.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"Trainer(precision={trainer.precision!r}) was given, which scales the loss before its backward, but a "
            "FlowModule's step runs a backward of its own for each microbatch, so gradients would come out too small. "
            "Set precision='bf16-mixed'."
        )


def refuse_groups_of_roles(trainer: L.Trainer) -> None:
    """Raises where DDP has taken the default group of an earlier flowtrain run, which is one role's, for its own.

    Raises:
        RuntimeError: says how many ranks each has and what to do.
    """
    if trainer.world_size > 1 and dist.is_initialized() and dist.get_world_size() != trainer.world_size:
        raise RuntimeError(
            f"This Trainer has {trainer.world_size} ranks, but torch.distributed's default group has "
            f"{dist.get_world_size()}: it is that of one role, from an earlier flowtrain run in this process. Call "
            "torch.distributed.destroy_process_group() on every rank before this run, or give it a script of its own."
        )


def _sum_over_ranks(device: torch.device | None) -> Callable[[Tensor], Tensor]:
    def sum_over_ranks(vector: Tensor) -> Tensor:
        if not dist.is_initialized():
            return vector
        summed = vector.to(device)
        dist.all_reduce(summed)
        return summed.cpu()

    return sum_over_ranks


def _gather_over_ranks(device: torch.device | None) -> Callable[[Any], list[Any]]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return lambda value: gather_over(None, ranks, value, device)
