"""A module whose computing is sleep: what it would cost, and real features and gradients that are checked.

Every picture is of one colour, and the colour is its number (`benchmarks/emulated_records.py`). The encoder reads the
number from the pixels and fills the features with a pattern of number and row; the backbone knows which pictures its
samples have, checks the pattern, and answers with gradients of another pattern, which the encoder checks in its
backward. Filling and checking are done within the time that the computing would take.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import thread_seconds
from flowtrain_lightning import FlowModule, PackedBatch, PackedMedia
from flowtrain_lightning.allocator import ROLES
from flowtrain_lightning.data import PackingConfig
from flowtrain_lightning.packing import CostModel, IntArray
from flowtrain_lightning.packing.role_graph import BACKBONE, ENCODER
from flowtrain_lightning.packing.step_work import PassTimes, in_two_passes
from flowtrain_lightning.placement.layout_costs import LayoutCosts

WIDTH = 2048
"""Numbers in a row of features, in bfloat16."""

_WORD = torch.int64  # compares four numbers at a time
_PATTERNS = 251  # all of 0..250 are exact in bfloat16
_SET_TIMER_SLACK = 29  # of prctl(2)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


@dataclass(frozen=True)
class EmulatedCost:
    """Seconds that forward and backward together take, see `LayoutCosts`; the forward takes a third.

    Attributes:
        per_patch: of an encoder batch.
        per_token: of a microbatch.
        optimizer: of the optimizer's step, for each half that a rank holds.
    """

    per_patch: float
    per_token: float
    optimizer: float = 0.0

    encoder_trains: ClassVar[bool] = True

    def batch(self, role: str, lengths: IntArray) -> PassTimes:
        """Seconds of forward and of backward of a batch."""
        return in_two_passes((self.per_token if role == BACKBONE else self.per_patch) * float(lengths.sum()))

    def end_of_step(self, role: str) -> tuple[float, float]:
        """Seconds of the reduction of gradients, which real ranks do, and of the optimizer."""
        return 0.0, self.optimizer

    def on_the_way(self, role: str, lengths: IntArray) -> float:
        """Seconds until hidden states are with the next stage, which real ranks move."""
        return 0.0

    @property
    def packing(self) -> PackingConfig:
        """How steps are packed by these costs."""
        return PackingConfig(CostModel(self.per_token, 0.0, 0.0), {ENCODER: CostModel(self.per_patch, 0.0, 0.0)})


class Clock:
    """Spends exact amounts of time. What one spell takes too long is taken off the next, so that their sum is right.

    Attributes:
        cpu_seconds: CPU time that emulating has taken, user and system: patterns, checks and sleeping.
    """

    def __init__(self) -> None:
        self._owed = 0.0
        self.cpu_seconds = (0.0, 0.0)
        system = ctypes.CDLL(None)
        system.prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1))  # wake up within microseconds
        # Freed memory stays with the process, as on a GPU: else each tensor would be fetched from the system anew.
        for threshold in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            system.mallopt(threshold, 1 << 30)

    @contextmanager
    def emulating(self) -> Iterator[None]:
        """Inside, this thread does what stands for the user's computing."""
        before = thread_seconds()
        yield
        user, system = (now - then for now, then in zip(thread_seconds(), before, strict=True))
        self.cpu_seconds = self.cpu_seconds[0] + user, self.cpu_seconds[1] + system

    def spend(self, start: float, seconds: float) -> None:
        """Return ``seconds`` after ``start``, a time of ``time.monotonic()``."""
        end = start + seconds - self._owed
        if (left := end - time.monotonic()) > 0:
            time.sleep(left)
        self._owed = max(0.0, time.monotonic() - end)


class _Encode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, media: PackedMedia, width: int, costs: LayoutCosts, clock: Clock, start: float
    ) -> Tensor:
        with clock.emulating():
            passes = costs.batch(ENCODER, lengths_of(media.cu_seqlens))
            ctx.seconds = passes.backward
            ctx.clock = clock
            ctx.numbers, ctx.rows = numbers_of(media), torch.tensor(media.rows)
            ctx.weight = weight
            features = bear(pattern(ctx.numbers, ctx.rows, 1), width)
            clock.spend(start, passes.forward)
        return features

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        start = time.monotonic()
        with ctx.clock.emulating():
            # Of one media item, without any gradient: encoded for nothing, since other ranks of a shard group encoded.
            if len(ctx.rows) > 1 or gradients[0].any():
                check(gradients[0], pattern(ctx.numbers, ctx.rows, 2), "gradients")
            ctx.clock.spend(start, ctx.seconds)
        return torch.ones_like(ctx.weight), None, None, None, None, None


@dataclass(frozen=True)
class Spell:
    """The time of a microbatch.

    Attributes:
        clock: spends it.
        start: when the forward has begun, a time of ``time.monotonic()``.
        forward: seconds of the forward.
        backward: seconds of the backward.
    """

    clock: Clock
    start: float
    forward: float
    backward: float


class _Train(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, features: Tensor, numbers: Tensor, rows: Tensor, tokens: int, spell: Spell
    ) -> Tensor:
        ctx.spell, ctx.numbers, ctx.rows, ctx.weight, ctx.width = spell, numbers, rows, weight, features.shape[-1]
        with spell.clock.emulating():
            check(features, pattern(numbers, rows, 1), "features")
            spell.clock.spend(spell.start, spell.forward)
        return weight.new_tensor(float(tokens))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        start, clock = time.monotonic(), ctx.spell.clock
        with clock.emulating():
            answer = bear(pattern(ctx.numbers, ctx.rows, 2), ctx.width)
            clock.spend(start, ctx.spell.backward)
        return torch.ones_like(ctx.weight), answer, None, None, None, None


class SleepingVLM(FlowModule):
    """The encoder of a vision-language model that sleeps, and all else that does not depend on its backbone.

    Args:
        costs: what computing costs in the layouts of the run.
        pictures: the file of `write_records` that says which pictures each record has.
        width: numbers in a row of features, a multiple of 4.
    """

    def __init__(self, costs: LayoutCosts, pictures: str, width: int = WIDTH) -> None:
        super().__init__()
        self.costs = costs
        self.clock = Clock()
        self.width = width
        self.pictures: list[list[list[int]]] = json.loads(Path(pictures).read_text())
        self.mark_checked()  # its gradients are no sums over samples, and checking it would sleep for each of them

    def configure_encoder(self) -> None:
        """One weight: what weights cost is not emulated."""
        self.encoder = nn.Linear(1, 1, bias=False)

    def configure_backbone(self) -> None:
        """One weight."""
        self.backbone: nn.Module = nn.Linear(1, 1, bias=False)

    def encode(self, media: PackedMedia) -> Tensor:
        """``[rows, width]`` of the pattern."""
        spent = (self.costs, self.clock, time.monotonic())
        features: Tensor = _Encode.apply(self.encoder.weight, media, self.width, *spent)  # type: ignore[no-untyped-call]
        return features

    def spell(self, batch: PackedBatch) -> Spell:
        """The time of a microbatch whose forward begins."""
        start = time.monotonic()
        with self.clock.emulating():
            passes = self.costs.batch(BACKBONE, lengths_of(batch.cu_seqlens))
        return Spell(self.clock, start, passes.forward, passes.backward)

    def pictures_of(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """``[media]`` the numbers of a microbatch's pictures, and their rows."""
        expected = [picture for sample in batch.samples for picture in self.pictures[sample]]
        numbers, rows = torch.tensor(expected, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return numbers, rows

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """An optimizer that costs little."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Spend what a step ends with."""
        here = [role for role in ROLES if not next(self.get_submodule(role).parameters()).is_meta]
        self.clock.spend(time.monotonic(), sum(sum(self.costs.end_of_step(role)) for role in here))


class EmulatedVLM(SleepingVLM):
    """A vision-language model that sleeps."""

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> tuple[Tensor, int]:
        """Check the features, and spend the time of a microbatch."""
        spell = self.spell(batch)
        with self.clock.emulating():
            numbers, rows = self.pictures_of(batch)
        found = features.get("image", torch.empty(0, self.width, dtype=torch.bfloat16))
        tokens = len(batch.tokens)
        weight = self.backbone.get_parameter("weight")
        loss: Tensor = _Train.apply(weight, found, numbers, rows, tokens, spell)  # type: ignore[no-untyped-call]
        return loss, tokens


def lengths_of(cu_seqlens: Tensor) -> IntArray:
    """``[sequences]`` of what is packed."""
    lengths: IntArray = np.diff(cu_seqlens.cpu().numpy()).astype(np.int64)
    return lengths


def numbers_of(media: PackedMedia) -> Tensor:
    """``[media]`` the pictures' numbers, read from the colour of each one's first pixel."""
    first = media.patches[media.cu_seqlens[:-1].long()].reshape(len(media.rows), 3, -1)[:, :, 0]
    colours = (first * 255).round().long()
    return (colours * torch.tensor([1 << 16, 1 << 8, 1])).sum(1)


def pattern(numbers: Tensor, rows: Tensor, kind: int) -> Tensor:
    """``[sum(rows)]`` small whole numbers that depend on picture, row and kind (1 features, 2 gradients)."""
    row = torch.cat([torch.arange(count) for count in rows.tolist()]) if len(rows) else rows
    return (numbers.repeat_interleave(rows) * 31 + row * 7 + kind * 101) % _PATTERNS


def bear(pattern: Tensor, width: int = WIDTH) -> Tensor:
    """``[rows, width]`` bfloat16 with ``pattern`` in every column."""
    return pattern.to(torch.bfloat16)[:, None].repeat(1, width)


def check(found: Tensor, expected: Tensor, what: str) -> None:
    """Refuse what does not bear the pattern in every place.

    Raises:
        RuntimeError: ``what`` are not as they were sent.
    """
    as_sent = bear(expected, found.shape[-1])
    if found.shape != as_sent.shape or not torch.equal(found.contiguous().view(_WORD), as_sent.view(_WORD)):
        raise RuntimeError(f"{what} of {len(expected)} rows do not bear the pattern with which they were sent.")
