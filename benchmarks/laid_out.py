"""One run whose roles have any layouts and whose computing is sleep: the module, and what every rank does."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from benchmarks.emulated_records import emulated_data
from benchmarks.emulation import SleepingVLM, Spell, bear, check, pattern
from benchmarks.measure import Meter
from benchmarks.precedence import Precedence
from benchmarks.schedules import EncoderFirst
from flowtrain_lightning import FlowTrainStrategy, PackedBatch, PoolSettings
from flowtrain_lightning.allocator import BACKBONE, Allocation
from flowtrain_lightning.data import PackingConfig
from flowtrain_lightning.parallel import TensorPlan
from flowtrain_lightning.parallel.experts.experts import Experts, grouped_product
from flowtrain_lightning.placement.layout_costs import LayoutCosts

WIDTH = 64
"""Numbers in a row of features, in bfloat16: few, since what moving them costs is measured elsewhere."""

KEPT_BATCHES = 4
"""Encoder batches whose activations a rank keeps: the strategy's default."""

_ALL_BATCHES = 1000


@dataclass(frozen=True)
class LaidOutJob:
    """What one run does.

    Attributes:
        allocation: ranks and layouts of the roles.
        costs: what computing costs in these layouts.
        packing: by which steps are packed.
        encoder_first: no backbone begins before all encoders have done the step's forwards, and no encoder works ahead
            into later steps.
        data: the folder of `write_records`.
        folder: where the ranks write what they measured.
        global_batch_size: samples of a step.
        token_budget: tokens of a microbatch.
        warmup: steps before the measurement.
        steps: steps that are measured.
        step_bytes: of all features of a step.
    """

    allocation: Allocation
    costs: LayoutCosts
    packing: PackingConfig
    encoder_first: bool
    data: Path
    folder: Path
    global_batch_size: int
    token_budget: int
    warmup: int
    steps: int
    step_bytes: int


class _SleepingBackbone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, expected: Tensor, answers: Tensor, spell: Spell) -> Tensor:
        ctx.spell, ctx.answers, ctx.weight, ctx.width = spell, answers, weight, rows.shape[-1]
        with spell.clock.emulating():
            check(rows, expected, "features")
            spell.clock.spend(spell.start, spell.forward)
        return weight.new_ones(len(rows))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        start, clock = time.monotonic(), ctx.spell.clock
        with clock.emulating():
            answer = bear(ctx.answers, ctx.width) * gradients[0].to(torch.bfloat16)[:, None]
            clock.spend(start, ctx.spell.backward)
        return gradients[0].sum().reshape(ctx.weight.shape), answer, None, None, None


class OneNumberExperts(Experts):
    """Experts of one number each: what they compute is in the cost, and rows are traded for them all the same."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.weight = nn.Parameter(torch.ones(count, 1, 1))

    def compute(self, rows: Tensor, weights: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        """``[rows, 1]``."""
        return grouped_product(rows, weights["weight"], ends)

    def trade(self) -> Tensor:
        """Lets a row pass every expert; 0, with a graph."""
        count = len(self.weight)
        rows: Tensor = self(torch.ones(count, 1), torch.arange(count)[:, None], torch.ones(count, 1))
        return 0 * rows.sum()


class Backbone(nn.Module):
    """A backbone that sleeps; it has one weight, and experts where ranks share them.

    Args:
        experts: 0 where ranks share none.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))
        self.experts = OneNumberExperts(experts) if experts else None

    def forward(self, rows: Tensor, expected: Tensor, answers: Tensor, spell: Spell) -> Tensor:
        """Check the rows, and spend the time of a microbatch; ``[own tokens]`` ones.

        Args:
            rows: ``[own tokens, width]``: features in their places, else 0.
            expected: ``[own tokens]`` what they must bear.
            answers: ``[own tokens]`` what their gradients will bear, times that of the token's loss.
            spell: of the microbatch.
        """
        ones: Tensor = _SleepingBackbone.apply(self.weight, rows, expected, answers, spell)  # type: ignore[no-untyped-call]
        return ones if self.experts is None else ones + self.experts.trade()


class LaidOutVLM(SleepingVLM):
    """A vision-language model that sleeps, in any layout: layers are whole on tensor ranks, sequences can be sliced.

    Attributes:
        experts: of the backbone; 0 where ranks share none.
    """

    experts = 0

    def configure_encoder(self) -> None:
        """One weight, which may be frozen."""
        super().configure_encoder()
        self.encoder.requires_grad_(self.costs.encoder_trains)

    def configure_backbone(self) -> None:
        """One weight."""
        self.backbone = Backbone(self.experts)

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        """Nothing is divided: what that would save is in the cost."""
        return {}

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        """Features in their places among the tokens, and what they must bear."""
        spell, tokens = self.spell(batch), len(batch.tokens)
        with self.clock.emulating():
            places = batch.media_positions.get("image", torch.empty(0, dtype=torch.int64))
            sent = [pattern(*self.pictures_of(batch), kind) for kind in (1, 2)]
            if len(sent[0]) != len(places):  # a piece, by which context ranks are compared at first
                sent = [features["image"][:, 0].detach().long()] * 2
            expected, answers = (torch.zeros(tokens, dtype=torch.int64).index_copy(0, places, each) for each in sent)
            rows = torch.zeros(tokens, self.width, dtype=torch.bfloat16)
            if len(places):
                rows = rows.index_copy(0, places, features["image"])
        return {"rows": rows, "expected": expected, "answers": answers, "spell": spell}

    def slice_tokens(self, arguments: dict[str, Any], own: slice) -> dict[str, Any]:
        """This rank's tokens."""
        return {name: each[own] if isinstance(each, Tensor) else each for name, each in arguments.items()}

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        """The number of own tokens, as a loss."""
        return outputs.sum(), len(outputs)


class EncoderFirstLaidOut(EncoderFirst, LaidOutVLM):
    """The same, whose backbone waits for a whole step's features."""


def train(job: LaidOutJob) -> None:
    """Train, as one of the job's ranks."""
    arguments = (job.costs, str(job.data / "pictures.json"), WIDTH)
    module: LaidOutVLM
    if job.encoder_first:
        module = EncoderFirstLaidOut(*arguments, done=job.folder / "encoded")
    else:
        module = LaidOutVLM(*arguments)
    backbone = job.allocation.layouts[BACKBONE]
    module.experts = backbone.data * backbone.tensor if backbone.expert > 1 else 0
    fit(job, module)


def fit(job: LaidOutJob, module: LaidOutVLM) -> None:
    """Train a module that sleeps, as one of the job's ranks."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=job.allocation.size,
        strategy=FlowTrainStrategy(
            allocation=job.allocation,
            encoder_activations=_ALL_BATCHES if job.encoder_first else KEPT_BATCHES,
            pool=PoolSettings(bytes=4 * job.step_bytes if job.encoder_first else None),
        ),
        max_steps=job.warmup + job.steps,
        callbacks=[Precedence(), Meter(job.folder, job.warmup, lambda: module.clock.cpu_seconds)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    trainer.fit(module, emulated_data(job.data, job.global_batch_size, job.token_budget, job.packing))


def train_all(jobs: Sequence[LaidOutJob]) -> None:
    """Train, as one of the ranks of all these jobs, one after another: so the process is warm for all but the first."""
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        train(job)
        gc.collect()  # the pool's memory
