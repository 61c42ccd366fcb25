"""A module whose backbone sleeps in stages: a block for each stage, real hidden states, features and gradients."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.emulation import Clock, bear, check, lengths_of
from benchmarks.laid_out import WIDTH, LaidOutJob, LaidOutVLM, fit
from flowtrain_lightning import PackedBatch
from flowtrain_lightning.allocator import BACKBONE, ENCODER
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.packing.stage_entries import stage_names
from flowtrain_lightning.placement.layout_costs import LayoutCosts


@dataclass(frozen=True)
class _Packed:
    """What blocks need to know of a microbatch.

    Attributes:
        lengths: ``[sequences]`` of it.
        expected: ``[tokens]`` what the rows must bear.
        answers: ``[tokens]`` what their gradients will bear.
    """

    lengths: IntArray
    expected: Tensor
    answers: Tensor


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, packed: _Packed, block: _Block) -> Tensor:
        start = time.monotonic()
        with block.clock.emulating():
            passes = block.costs.batch(block.name, packed.lengths)
            ctx.seconds = passes.backward
            check(rows, packed.expected, "rows")
            ctx.block, ctx.weight, ctx.packed = block, weight, packed
            block.clock.spend(start, passes.forward)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        start, block = time.monotonic(), ctx.block
        with block.clock.emulating():
            answer = gradients[0]
            if block.is_first:
                answer = bear(ctx.packed.answers, answer.shape[-1]) * answer
            block.clock.spend(start, ctx.seconds)
        return torch.ones_like(ctx.weight), answer, None, None


class _Block(nn.Module):
    """What one stage computes, asleep.

    Args:
        name: of the stage.
        is_first: it answers the features.
        costs: of the stage.
        clock: that all share.
    """

    def __init__(self, name: str, is_first: bool, costs: LayoutCosts, clock: Clock) -> None:
        super().__init__()
        self.name, self.is_first, self.costs, self.clock = name, is_first, costs, clock
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, rows: Tensor, packed: _Packed) -> Tensor:
        """``[tokens, width]``, as they were given."""
        if not self.training:  # a trial, by which the runtime learns what hidden states are
            return rows
        slept: Tensor = _Sleep.apply(self.weight, rows, packed, self)  # type: ignore[no-untyped-call]
        return slept


class _Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.shape, ctx.kind = rows.shape, rows.dtype
        return torch.ones(len(rows))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].to(ctx.kind)[:, None].expand(ctx.shape)


class _Blocks(nn.Module):
    def __init__(self, stages: int, costs: LayoutCosts, clock: Clock) -> None:
        super().__init__()
        names = stage_names(BACKBONE, stages)
        self.blocks = nn.ModuleList(_Block(name, not number, costs, clock) for number, name in enumerate(names))

    def forward(self, rows: Tensor, packed: _Packed) -> Tensor:
        """``[tokens]`` ones."""
        for block in self.blocks:
            rows = block(rows, packed)
        ones: Tensor = _Ones.apply(rows)  # type: ignore[no-untyped-call]
        return ones


class StagedVLM(LaidOutVLM):
    """A vision-language model that sleeps, whose backbone has stages.

    Attributes:
        stages: of the backbone.
    """

    stages = 2

    def configure_backbone(self) -> None:
        """A block of one weight for each stage."""
        self.backbone = _Blocks(self.stages, self.costs, self.clock)

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        """Features in their places among the tokens; what they must bear, and their gradients."""
        found = super().merge(batch, features)
        packed = _Packed(lengths_of(batch.cu_seqlens), found["expected"], found["answers"])
        return {"rows": found["rows"], "packed": packed}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Spend what a step ends with."""
        here = [block.name for block in self.backbone.blocks if not block.weight.is_meta]  # type: ignore[union-attr]
        here += [] if next(self.encoder.parameters()).is_meta else [ENCODER]
        self.clock.spend(time.monotonic(), sum(sum(self.costs.end_of_step(name)) for name in here))


def train(job: LaidOutJob) -> None:
    """Train in stages, as one of the job's ranks."""
    module = StagedVLM(job.costs, str(job.data / "pictures.json"), WIDTH)
    module.stages = job.allocation.layouts[BACKBONE].pipeline
    fit(job, module)
