"""One training run under Lightning on any layout; every rank writes down all that it computed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowtrain_lightning.callbacks import FlowReplan
from flowtrain_lightning.data import PackingConfig, StepBatch, TokenSteps
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from flowtrain_lightning.runtime.timeline import COMPUTE
from flowtrain_lightning.strategy import FlowTrainStrategy
from tests.exactness.data import STEPS, steps_data
from tests.exactness.layouts import trainer_for
from tests.exactness.modules import KINDS

Named = dict[str, Tensor | None]


class Recorder(L.Callback):
    """Keeps what a rank computed.

    Attributes:
        initial: weights before the first step.
        losses: of each step.
        gradients: of each step, before clipping; None where a parameter has none.
        weights: after each step.
        microbatches: of each step, on this rank.
        encoder_batches: of each step, on this rank.
        computed: of each step, how often this rank ran what, such as ``encoder: forward again``.
    """

    def __init__(self) -> None:
        self.initial: Named = {}
        self.losses: list[float] = []
        self.gradients: list[Named] = []
        self.weights: list[Named] = []
        self.microbatches: list[int] = []
        self.encoder_batches: list[int] = []
        self.computed: list[dict[str, int]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.initial = weights_of(pl_module)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: StepBatch, _: int) -> None:
        encoders = {*batch.plan.graph.producers} & {*pl_module.halves}  # one process takes several for one
        idle = [role for role in encoders if not any(len(media) for own in batch.plan.batches[role] for media in own)]
        self._idle = tuple(f"{path}." for role in idle for path in pl_module.halves[role])

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.gradients.append(gradients_of(pl_module, self._idle))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.weights.append(weights_of(pl_module))
        self.microbatches.append(len(batch.microbatches))
        self.encoder_batches.append(sum(map(len, batch.media.values())))
        if isinstance(trainer.strategy, FlowTrainStrategy):
            spans = [span for span in trainer.strategy.runner.timeline.spans if span.kind == COMPUTE]
            of_step = (f"{span.lane}: {span.name}" for span in spans if span.step == batch_idx)
            self.computed.append(dict(Counter(of_step)))

    def save(self, folder: Path) -> None:
        names = ("initial", "losses", "gradients", "weights", "microbatches", "encoder_batches", "computed")
        torch.save({name: getattr(self, name) for name in names}, folder / f"rank{os.environ['RANK']}.pt")


class StepsBy(L.Callback):
    """Lets optimizers step all weights of a group by one kernel, ``"foreach"`` or ``"fused"``, as on CUDA."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups):
            group[self._kernel] = True


def weights_of(module: torch.nn.Module) -> Named:
    """Weights that live on this rank, by name."""
    return {name: _weight(p) for name, p in module.named_parameters() if not p.is_meta}


def gradients_of(module: torch.nn.Module, idle: tuple[str, ...] = ()) -> Named:
    """Gradients of the weights that live on this rank, by name.

    Args:
        module: has them.
        idle: how the names of those begin whose encoder has no media in the step, and so no gradient.
    """
    here = {name: p for name, p in module.named_parameters() if not p.is_meta}
    return {name: _gradient(p, not name.startswith(idle)) for name, p in here.items()}


def _weight(parameter: torch.nn.Parameter) -> Tensor:
    if not hasattr(parameter, "ds_id"):
        return whole(parameter.detach()).clone()
    with sys.modules["deepspeed"].zero.GatheredParameters([parameter]):  # all ranks of a role ask
        return parameter.detach().clone()


def _gradient(parameter: torch.nn.Parameter, is_used: bool) -> Tensor | None:
    if parameter.grad is not None:
        return whole(parameter.grad).clone()
    if "deepspeed" not in sys.modules or not is_used or not parameter.requires_grad:
        return None
    gradient: Tensor | None = sys.modules["deepspeed.utils"].safe_get_full_grad(parameter)  # all ranks of a role ask
    return gradient


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which ranks hold shards; all of these ranks ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    precision: str = "64-true",
    clip: float | None = None,
    clip_by: str = "norm",
    kind: str = "tiny",
    module: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    replan: bool = False,
    kernel: str = "",
) -> None:
    """Trains ``STEPS`` steps, with ``settings`` of the data module, and writes ``rank<r>.pt`` into ``folder``."""
    torch.backends.cudnn.allow_tf32 = False  # else convolutions on GPUs keep three digits
    recorder = Recorder()
    if layout.startswith("mixed"):  # more to encode than the ranks can that only encode
        much = {"encoder": {"linear": 4.0, "quadratic": 0.0, "constant": 0.0}}
        settings = {"packing": {"media_costs": much}, **(settings or {})}
    trainer = trainer_for(
        layout,
        strategy=strategy,
        precision=precision,
        max_steps=STEPS,
        gradient_clip_val=clip,
        gradient_clip_algorithm=clip_by,
        limit_val_batches=0,
        callbacks=[recorder, *([FlowReplan()] if replan else []), *([StepsBy(kernel)] if kernel else [])],
        default_root_dir=folder,
    )
    trainer.fit(KINDS[kind](**(module or {})), datamodule=steps_data(Path(data), **_typed(settings or {})))
    recorder.save(folder)
    disconnect_groups()


def _typed(settings: dict[str, Any]) -> dict[str, Any]:
    """Sections of a data module's settings as what they are."""
    typed = dict(settings)
    if "token_steps" in typed:
        typed["token_steps"] = TokenSteps(**typed["token_steps"])
    if "packing" in typed:
        packing = dict(typed["packing"])
        if "cost" in packing:
            packing["cost"] = CostModel(**packing["cost"])
        if "media_costs" in packing:
            packing["media_costs"] = {role: CostModel(**cost) for role, cost in packing["media_costs"].items()}
        typed["packing"] = PackingConfig(**packing)
    return typed
