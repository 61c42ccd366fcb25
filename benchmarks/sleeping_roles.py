"""A module of several roles whose computing is sleep: two encoders, a backbone and a generator; and a run of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.emulation import Clock
from benchmarks.measure import Meter
from benchmarks.modules import TOKENIZER
from benchmarks.precedence import Precedence
from benchmarks.schedules import EncoderFirst
from flowtrain_lightning import FlowModule, FlowTrainStrategy, PackedBatch, PackedMedia, PoolSettings
from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.data import (
    FlowDataModule,
    GivenTokens,
    LoadedMedia,
    PackedTargets,
    PackingConfig,
    Record,
    SampleSizes,
)
from flowtrain_lightning.packing import CostModel, IntArray
from flowtrain_lightning.packing.role_graph import GENERATED
from flowtrain_lightning.packing.step_work import PassTimes, in_two_passes

WIDTH = 16
"""Numbers in a row of features: few, since what moving them costs is measured elsewhere."""

PATCH_DIM = 4
CONDITION_ROWS = 8
TOKEN_BUDGET, ENCODER_BUDGET = 1024, 512
KEPT_BATCHES = 4
"""Encoder batches whose activations a rank keeps: the strategy's default."""

IMAGE, AUDIO = "image", "audio"
_MEDIA_IDS = {IMAGE: 3, AUDIO: 4, GENERATED: 5}
_PATCHES_PER_ROW = 4
_ALL_BATCHES = 1000
_POOL_BYTES = 1 << 26


@dataclass(frozen=True)
class Given:
    """A media item in memory.

    Attributes:
        modality: of it.
        patches: how many it has.
    """

    modality: str
    patches: int

    def __str__(self) -> str:
        return f"{self.patches} patches ({self.modality})"

    @property
    def rows(self) -> int:
        """Tokens that it becomes."""
        return CONDITION_ROWS if self.modality == GENERATED else self.patches // _PATCHES_PER_ROW

    def load(self) -> LoadedMedia:
        """Patches of zeros."""
        zeros = np.zeros((self.patches, PATCH_DIM), dtype=np.float32)
        kind = AUDIO if self.modality == AUDIO else IMAGE
        return LoadedMedia(zeros, (1, self.patches), self.patches // _PATCHES_PER_ROW, modality=kind)


class DrawnSamples:
    """Samples in memory: text, pictures, sounds, and pictures that are to be generated.

    Args:
        count: how many.
        pooled: one encoder takes pictures and sounds alike, as media of one modality.
    """

    def __init__(self, count: int, *, pooled: bool) -> None:
        self.fingerprint = f"samples of {'one encoder' if pooled else 'two encoders'} that sleeps"
        draw = np.random.default_rng(0)
        self._media = [_drawn_media(draw, IMAGE if pooled else AUDIO) for _ in range(count)]
        self._text = draw.integers(100, 500, count)
        every = [item for media in self._media for item in media]
        rows = np.array([sum(item.rows for item in media) for media in self._media])
        self._sizes = SampleSizes(
            tokens=self._text + rows,
            targets=self._text - np.array([not media for media in self._media]),
            media_start=np.concatenate([[0], np.cumsum([len(media) for media in self._media])]).astype(np.int64),
            media_rows=np.array([item.rows for item in every]),
            media_patches=np.array([item.patches for item in every]),
            media_modality=np.array([item.modality for item in every]),
        )

    def __len__(self) -> int:
        return len(self._media)

    def sizes(self, samples: IntArray) -> SampleSizes:
        """Sizes of some samples."""
        return self._sizes.select(samples)

    def record(self, sample: int) -> Record:
        """One sample: its media, then its text."""
        media = self._media[sample]
        ids = np.array([*(_MEDIA_IDS[item.modality] for item in media), *[9] * int(self._text[sample])])
        written = GivenTokens(ids, ids == 9, tuple(_MEDIA_IDS.values()))
        generated = frozenset(number for number, item in enumerate(media) if item.modality == GENERATED)
        return Record(f"sample {sample}", str(sample), (), media, {}, written=written, generated=generated)


def _drawn_media(draw: np.random.Generator, sound: str) -> tuple[Given, ...]:
    counts = ((IMAGE, draw.choice(4, p=(0.2, 0.4, 0.2, 0.2))), (sound, draw.choice(2)), (GENERATED, draw.choice(2)))
    return tuple(
        Given(modality, int(draw.integers(16, 65)) * _PATCHES_PER_ROW)
        for modality, count in counts
        for _ in range(count)
    )


@dataclass(frozen=True)
class SleepingCosts:
    """Seconds that forward and backward together take, of which the forward is a third.

    Attributes:
        per_unit: half -> seconds for each patch that it encodes or generates, or token of the backbone.
    """

    per_unit: Mapping[str, float]

    def of(self, role: str, units: int) -> PassTimes:
        """Seconds of forward and of backward."""
        return in_two_passes(self.per_unit[role] * units)

    def packing(self, roles: Iterable[str]) -> PackingConfig:
        """How steps of a module of these roles are packed by these costs."""
        models = {role: CostModel(self.per_unit[role], 0.0, 0.0) for role in roles}
        return PackingConfig(models.pop("backbone"), models)


class _Sleep(torch.autograd.Function):
    """Makes zeros of the wanted shapes, and takes its time for it in each direction."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, seconds: PassTimes, clock: Clock, shapes: tuple[tuple[int, ...], ...], *given: Tensor
    ) -> tuple[Tensor, ...]:
        start = time.monotonic()
        with clock.emulating():
            ctx.seconds, ctx.clock, ctx.like = seconds, clock, (weight, *given)
            made = tuple(weight.new_zeros(shape) for shape in shapes)
            clock.spend(start, seconds.forward)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        start = time.monotonic()
        with ctx.clock.emulating():
            weight, *given = (torch.zeros_like(each) for each in ctx.like)
            ctx.clock.spend(start, ctx.seconds.backward)
        return weight, None, None, None, *given


class SleepingRoles(FlowModule):
    """Two encoders, each with a role of its own, a backbone and a generator, all of which sleep.

    Args:
        costs: what computing costs.
    """

    halves: Mapping[str, tuple[str, ...]] = {
        "encoder_image": ("eye",),
        "encoder_audio": ("ear",),
        "backbone": ("backbone",),
        "generator": ("drawer",),
    }
    condition_rows = CONDITION_ROWS

    def __init__(self, costs: SleepingCosts) -> None:
        super().__init__()
        self.costs, self.clock = costs, Clock()
        self.mark_checked()  # its gradients are no sums over samples

    def configure_encoder_image(self) -> None:
        """One weight: what weights cost is not emulated."""
        self.eye = nn.Linear(1, 1, bias=False)

    def configure_encoder_audio(self) -> None:
        """One weight."""
        self.ear = nn.Linear(1, 1, bias=False)

    def configure_backbone(self) -> None:
        """One weight."""
        self.backbone = nn.Linear(1, 1, bias=False)

    def configure_generator(self) -> None:
        """One weight."""
        self.drawer = nn.Linear(1, 1, bias=False)

    def encode(self, media: PackedMedia) -> Tensor:
        """``[rows, width]`` zeros."""
        role, half = self.encoder_of(media.modality)
        return self._slept(role, half, len(media.pixels), ((sum(media.rows), WIDTH),))[0]

    def encoder_of(self, modality: str) -> tuple[str, nn.Module]:
        """The role that encodes a modality, and its module."""
        return ("encoder_image", self.eye) if modality == IMAGE else ("encoder_audio", self.ear)

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> tuple[Tensor, int, Tensor]:
        """A loss of zero, and rows of zeros for the generator."""
        shapes = ((), (len(batch.condition_positions), WIDTH))
        loss, rows = self._slept("backbone", self.backbone, len(batch.tokens), shapes, *features.values())
        return loss, len(batch.targets), rows

    def generator_loss(self, items: PackedTargets, condition: Any) -> tuple[Tensor, int]:
        """A loss of zero."""
        (loss,) = self._slept("generator", self.drawer, len(items.values), ((),), condition)
        return loss, items.values.numel()

    def _slept(
        self, role: str, half: nn.Module, units: int, shapes: tuple[tuple[int, ...], ...], *given: Tensor
    ) -> tuple[Tensor, ...]:
        weight, seconds = half.get_parameter("weight"), self.costs.of(role, units)
        made: tuple[Tensor, ...] = _Sleep.apply(weight, seconds, self.clock, shapes, *given)  # type: ignore[no-untyped-call]
        return made

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """An optimizer that costs little."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class PooledRoles(SleepingRoles):
    """The same, with one role that encodes pictures and sounds."""

    halves: Mapping[str, tuple[str, ...]] = {"encoder": ("eye",), "backbone": ("backbone",), "generator": ("drawer",)}

    def configure_encoder(self) -> None:
        """One weight."""
        self.configure_encoder_image()

    def encoder_of(self, modality: str) -> tuple[str, nn.Module]:
        """See `SleepingRoles`."""
        return "encoder", self.eye


class EncoderFirstRoles(EncoderFirst, SleepingRoles):
    """Roles of their own, of which the backbone waits for all features of a step."""


@dataclass(frozen=True)
class RolesJob:
    """What one run does.

    Attributes:
        allocation: ranks and layouts of the roles.
        costs: what computing costs.
        encoder_first: the backbone waits for all features of a step.
        folder: where the ranks write what they measured.
        samples: of a step.
        warmup: steps before the measurement.
        steps: steps that are measured.
    """

    allocation: Allocation
    costs: SleepingCosts
    encoder_first: bool
    folder: Path
    samples: int
    warmup: int
    steps: int


def roles_data(samples: int, steps: int, costs: SleepingCosts | None = None, *, pooled: bool) -> FlowDataModule:
    """The data module of so many steps, packed by these costs; see `DrawnSamples`."""
    return FlowDataModule(
        DrawnSamples(samples * steps, pooled=pooled),
        tokenizer=TOKENIZER,
        token_budget=TOKEN_BUDGET,
        encoder_budget=ENCODER_BUDGET,
        global_batch_size=samples,
        seed=0,
        packing=PackingConfig() if costs is None else costs.packing((PooledRoles if pooled else SleepingRoles).halves),
    )


def train(job: RolesJob) -> None:
    """Trains, as one of the job's ranks."""
    module: SleepingRoles
    pooled = "encoder" in job.allocation.layouts
    if job.encoder_first:
        module = EncoderFirstRoles(job.costs, done=job.folder / "encoded")
    else:
        module = (PooledRoles if pooled else SleepingRoles)(job.costs)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=job.allocation.size,
        strategy=FlowTrainStrategy(
            allocation=job.allocation,
            encoder_activations=_ALL_BATCHES if job.encoder_first else KEPT_BATCHES,
            pool=PoolSettings(bytes=_POOL_BYTES if job.encoder_first else None),
        ),
        max_steps=job.warmup + job.steps,
        callbacks=[Precedence(), Meter(job.folder, job.warmup, lambda: module.clock.cpu_seconds)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    trainer.fit(module, roles_data(job.samples, job.warmup + job.steps, job.costs, pooled=pooled))
