"""A module of two encoders, a backbone and a generator whose computing is sleep, its data, and what every rank does."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import soundfile
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.emulated_records import IMAGES
from benchmarks.emulation import Clock
from benchmarks.measure import Meter
from benchmarks.precedence import Precedence
from flowtrain_lightning import FlowModule, FlowTrainStrategy, PackedBatch, PackedMedia, PoolSettings
from flowtrain_lightning.allocator import Allocation, graph_of
from flowtrain_lightning.data import AudioProcessor, FlowDataModule, IndexConfig, PackedTargets
from recipes.omni.scenes import tokenizer

GRAPH = graph_of(("encoder_image", "encoder_audio", "backbone", "generator"))
SECONDS = {"encoder_image": 6e-5, "encoder_audio": 6e-4, "backbone": 4e-4, "generator": 1.2e-4}
"""Of a patch, a frame, a token and a patch that is drawn, forward and backward; the forward takes a third."""
WIDTH = 64
ROWS = 4

_AUDIO = AudioProcessor(sample_rate=8000, frame_samples=80, frames_per_row=4)
_TOKEN_BUDGET = 1024
_ALL_BATCHES = 1000
_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class RolesJob:
    """What one run does.

    Attributes:
        data: the folder of `write_scenes`.
        folder: where the ranks write what they measured.
        ranks: processes.
        stretch: times as long as `SECONDS` says that computing takes.
        samples: of a step.
        warmup: steps before the measurement.
        steps: steps that are measured.
        allocation: ranks of the roles; None is DDP.
        encoder_first: no backbone begins before all encoders have done the step's forwards.
    """

    data: Path
    folder: Path
    ranks: int
    stretch: float
    samples: int
    warmup: int
    steps: int
    allocation: Allocation | None = None
    encoder_first: bool = False


class _Sleeping(torch.autograd.Function):
    """Takes what it reads, sleeps, and gives a row of zeros for each row that it makes, and a loss."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: int, spent: tuple[Clock, float, float, float], *read: Tensor) -> Any:
        ctx.clock, start, forward, ctx.backward_seconds = spent
        ctx.weight, ctx.shapes = weight, [each.shape for each in read]
        ctx.clock.spend(start, forward)
        return weight.new_zeros(rows, WIDTH), weight.new_ones(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.spend(time.monotonic(), ctx.backward_seconds)
        return torch.ones_like(ctx.weight), None, None, *(ctx.weight.new_zeros(shape) for shape in ctx.shapes)


class SleepingRoles(FlowModule):
    """It sees, hears, reads and draws, all of it by sleeping.

    Args:
        stretch: times as long as `SECONDS` says.
        done: the file in which encoders note the steps whose forwards are done, where the backbone waits for these.
    """

    condition_rows = ROWS

    def __init__(self, stretch: float, done: Path | None = None) -> None:
        super().__init__()
        self.halves = {role: (f"{role}_half",) for role in GRAPH.roles}
        self.stretch, self.clock = stretch, Clock()
        self._done = None if done is None else np.memmap(done, dtype=np.int64, mode="r+")
        self._planned = self._forwards = self._steps = 0
        self.mark_checked()  # its gradients are no sums over samples

    def configure_encoder_image(self) -> None:
        """One weight, as every half has: what weights cost is not emulated."""
        self.encoder_image_half = nn.Linear(1, 1, bias=False)

    def configure_encoder_audio(self) -> None:
        """One weight."""
        self.encoder_audio_half = nn.Linear(1, 1, bias=False)

    def configure_backbone(self) -> None:
        """One weight."""
        self.backbone_half = nn.Linear(1, 1, bias=False)

    def configure_generator(self) -> None:
        """One weight."""
        self.generator_half = nn.Linear(1, 1, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Notes which forwards the backbone waits for."""
        self._steps += 1
        if self._done is not None:
            own = [role for role in GRAPH.producers if role in batch.program.roles]
            self._planned += sum(len(batch.program.roles[role].batches) for role in own)
            self._note()
        return super().training_step(batch, batch_idx)

    def encode(self, media: PackedMedia) -> Tensor:
        """``[rows, WIDTH]``."""
        rows, _ = self._sleep(f"encoder_{media.modality}", int(media.cu_seqlens[-1]), sum(media.rows))
        if self._done is not None and torch.is_grad_enabled():
            self._forwards += 1
            self._note()
        return rows

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> Any:
        """The loss, its count, and rows to draw from."""
        while self._done is not None and int(self._done.min()) < self._steps:
            time.sleep(_POLL_SECONDS)
        rows, loss = self._sleep("backbone", len(batch.tokens), len(batch.condition_positions), *features.values())
        return loss, len(batch.targets), rows

    def generator_loss(self, items: PackedTargets, condition: Any) -> tuple[Tensor, int]:
        """The loss and its count."""
        _, loss = self._sleep("generator", len(items.values), 0, condition)
        return loss, items.values.numel()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """An optimizer that costs little."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def _note(self) -> None:
        if self._done is not None and self._forwards == self._planned:
            self._done[self.trainer.global_rank] = self._steps

    def _sleep(self, role: str, units: int, rows: int, *read: Tensor) -> tuple[Tensor, Tensor]:
        seconds = self.stretch * SECONDS[role] * units
        weight = self.get_submodule(f"{role}_half").get_parameter("weight")
        spent = (self.clock, time.monotonic(), seconds / 3, 2 * seconds / 3)
        made, loss = _Sleeping.apply(weight, rows, spent, *read)  # type: ignore[no-untyped-call]
        return made, loss


def write_scenes(folder: Path, records: int) -> None:
    """``train.jsonl`` with pictures, tones and pictures to draw: most records have one of each, some two or none."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, lines = np.random.default_rng(0), []
    for number in range(64):
        high, wide = (int(side) for side in 4 * draw.integers(4, 17, 2))
        Image.new("RGB", (wide, high), (number, number, number)).save(folder / f"{number}.png")
        soundfile.write(folder / f"{number}.wav", np.zeros(int(draw.integers(800, 8000))), _AUDIO.sample_rate)
    for _ in range(records):
        seen, heard, drawn = (draw.integers(0, 64, draw.choice(3, p=(0.2, 0.6, 0.2))).tolist() for _ in range(3))
        asked = [{"type": "image", "path": f"{each}.png"} for each in seen]
        asked += [{"type": "audio", "path": f"{each}.wav"} for each in heard]
        told = [{"type": "image", "path": f"{each}.png", "generate": True} for each in drawn]
        words = {"type": "text", "text": " ".join(["a"] * int(draw.integers(5, 120)))}
        messages = [
            {"role": "user", "content": [*asked, {"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": [*told, words]},
        ]
        lines.append(json.dumps({"messages": messages}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


def roles_data(job: RolesJob) -> FlowDataModule:
    """The data module over what `write_scenes` wrote."""
    data = FlowDataModule(
        job.data / "train.jsonl",
        tokenizer=tokenizer(),  # each word is a token, known or not
        images=IMAGES,
        audio=_AUDIO,
        token_budget=_TOKEN_BUDGET,
        global_batch_size=job.samples,
        seed=0,
        index=IndexConfig(cache_dir=job.data / "index"),
    )
    data.read_as(SleepingRoles(job.stretch))
    return data


def train(job: RolesJob) -> None:
    """Train, as one of the job's ranks."""
    done = job.folder / "encoded" if job.encoder_first else None  # `expect_encoders` has made it
    module = SleepingRoles(job.stretch, done)
    kept: Any = {"encoder_activations": _ALL_BATCHES, "pool": PoolSettings(bytes=1 << 26)} if job.encoder_first else {}
    strategy: Any = "ddp" if job.allocation is None else FlowTrainStrategy(allocation=job.allocation, **kept)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=job.ranks,
        strategy=strategy,
        max_steps=job.warmup + job.steps,
        callbacks=[Precedence(), Meter(job.folder, job.warmup, lambda: module.clock.cpu_seconds)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    trainer.fit(module, roles_data(job))
