"""The schedules of `train.py --emulate`, and what every rank of one run does."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from benchmarks.emulated_records import emulated_data
from benchmarks.emulation import EmulatedCost, EmulatedVLM
from benchmarks.ideal import Rules
from benchmarks.measure import Meter
from benchmarks.precedence import take_precedence
from flowtrain_lightning import FlowModule, FlowTrainStrategy, PackedBatch, PackedMedia, PoolSettings, RoleLayout
from flowtrain_lightning.allocator import BACKBONE, Placement, default_allocation
from flowtrain_lightning.data import StepBatch
from flowtrain_lightning.packing import StepPlan

SCHEDULES = {
    "flowtrain": "flowtrain, separate",
    "sharded": "flowtrain, separate, the backbone in shards: its ranks meet at every microbatch",
    "batch-synchronous": "batch-synchronous: all forwards of the encoders, then the backbone",
    "mixed": "flowtrain, mixed: half as many ranks only encode, and backbone ranks encode the rest",
    "uniform": "uniform: all ranks do everything",
}
"""Name -> what it is, in tables and pictures."""

_KEPT_BATCHES = 4  # the strategy's default
_POLL_SECONDS = 2e-4


@dataclass(frozen=True)
class EmulatedJob:
    """What one run does.

    Attributes:
        schedule: one of ``SCHEDULES``.
        ranks: processes.
        encoder_ranks: how many of them only encode, where not all do everything.
        cost: what computing costs.
        data: the folder of `write_records`.
        folder: where the ranks write what they measured.
        global_batch_size: samples of a step.
        token_budget: tokens of a microbatch.
        warmup: steps before the measurement.
        steps: steps that are measured.
        step_bytes: room for all features of a step in the pool of one encoder rank, which encoding a whole step first
            needs.
    """

    schedule: str
    ranks: int
    encoder_ranks: int
    cost: EmulatedCost
    data: Path
    folder: Path
    global_batch_size: int
    token_budget: int
    warmup: int
    steps: int
    step_bytes: int

    @property
    def rules(self) -> Rules:
        """By which rules its ideal is computed."""
        allocation = default_allocation(self.ranks, self.placement, self.only_encode)
        first = self.schedule == "batch-synchronous"
        return Rules(allocation.with_roles(self.roles), self.cost, self.kept_batches, first)

    @property
    def placement(self) -> Placement:
        """How roles share ranks."""
        return "colocated" if self.schedule == "uniform" else "mixed" if self.schedule == "mixed" else "separate"

    @property
    def only_encode(self) -> int | None:
        """How many ranks only encode; None where all do everything."""
        return None if self.placement == "colocated" else self.encoder_ranks

    @property
    def roles(self) -> dict[str, RoleLayout]:
        """Role -> its layout, where it is not whole copies."""
        return {BACKBONE: RoleLayout(shard="fsdp")} if self.schedule == "sharded" else {}

    @property
    def kept_batches(self) -> int:
        """Encoder batches whose activations are kept. Who encodes the whole step first must keep all of them."""
        return 1000 if self.schedule == "batch-synchronous" else _KEPT_BATCHES


class EncoderFirst(FlowModule):
    """A module whose backbone does not begin before every encoder has done its forwards of the whole step.

    Encoder ranks note in a shared file the last step whose forwards are done; the backbone waits for all of them. It
    is mixed into a class that sleeps.
    """

    def __init__(self, *args: Any, done: Path, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._done = np.memmap(done, dtype=np.int64, mode="r+")
        self._own: int | None = None
        self._forwards = self._planned = self._steps = 0

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """Notes how many forwards there are until this step's end."""
        strategy = self.trainer.strategy
        assert isinstance(strategy, FlowTrainStrategy)
        allocation = strategy.allocation
        encoding = sorted({rank for role in allocation.producers for rank in allocation.ranks[role]})
        self._own = encoding.index(strategy.global_rank) if strategy.global_rank in encoding else None
        self._steps += 1
        own = [batch.program.roles[role] for role in allocation.producers if role in batch.program.roles]
        self._planned += sum(len(lane.batches) for lane in own)
        self._note()
        return super().training_step(batch, batch_idx)

    def encode(self, media: PackedMedia) -> Any:
        """Counts the forward."""
        features = super().encode(media)
        if torch.is_grad_enabled():  # without gradients it only looks at what features are
            self._forwards += 1
            self._note()
        return features

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> Any:
        """Waits for all forwards; not where it only looks at what rows are, before anything is encoded."""
        while stage == "train" and int(self._done.min()) < self._steps:
            time.sleep(_POLL_SECONDS)
        return super().backbone_step(batch, features, stage)

    def _note(self) -> None:
        if self._own is not None and self._forwards == self._planned:
            self._done[self._own] = self._steps


class EncoderFirstVLM(EncoderFirst, EmulatedVLM):
    """The emulated model whose backbone waits."""


def expect_encoders(folder: Path, encoder_ranks: int) -> Path:
    """The file by which an `EncoderFirst` waits."""
    file = folder / "encoded"
    file.write_bytes(bytes(np.zeros(encoder_ranks, np.int64)))
    return file


class PlanRecorder(L.Callback):
    """Keeps the plans of all steps, and what the lanes did, for the parent process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plans: list[StepPlan] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: StepBatch, batch_idx: int
    ) -> None:
        """Keeps the plan."""
        self._plans.append(batch.plan)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes plans (rank 0) and timeline."""
        strategy = trainer.strategy
        assert isinstance(strategy, FlowTrainStrategy)
        rank = trainer.global_rank
        strategy.runner.timeline.save(self._folder / "timeline" / f"rank{rank}.json", rank, strategy.job.labels[rank])
        if trainer.is_global_zero:
            (self._folder / "plans.pickle").write_bytes(pickle.dumps(self._plans))


def train(job: EmulatedJob) -> None:
    """Train, as one of the job's ranks."""
    take_precedence()
    folder, data = job.folder, job.data
    arguments = (job.cost, str(data / "pictures.json"))
    first = job.schedule == "batch-synchronous"
    module = EncoderFirstVLM(*arguments, done=folder / "encoded") if first else EmulatedVLM(*arguments)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=job.ranks,
        strategy=FlowTrainStrategy(
            encoder_ranks=job.only_encode,
            placement=job.placement,
            roles=job.roles,
            encoder_activations=job.kept_batches,
            pool=PoolSettings(bytes=2 * job.step_bytes if job.schedule == "batch-synchronous" else None),
        ),
        max_steps=job.warmup + job.steps,
        callbacks=[Meter(folder, job.warmup, lambda: module.clock.cpu_seconds), PlanRecorder(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, emulated_data(data, job.global_batch_size, job.token_budget, job.cost.packing))
