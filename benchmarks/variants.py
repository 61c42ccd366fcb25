"""The four variants of `train.py`, and what every rank of one run does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from benchmarks.measure import Meter
from benchmarks.modules import Work, packed_module
from benchmarks.padded import PaddedData, PaddedVLM
from flowtrain_lightning import FlowTrainStrategy

VARIANTS = {
    "padded": "DDP, padded batches",
    "packed": "DDP, packed by flowtrain",
    "separate": "flowtrain 1 + 1",
    "colocated": "flowtrain colocated x2",
}
"""Name -> what it is, in tables and pictures."""


@dataclass(frozen=True)
class Job:
    """What one run does.

    Attributes:
        variant: one of ``VARIANTS``.
        module: one of ``benchmarks.modules.MODULES``.
        records: the training file.
        folder: where the ranks write what they measured.
        cache: folder of the data's index.
        warmup: steps before the measurement.
        steps: steps that are measured.
        global_batch_size: samples of a step.
    """

    variant: str
    module: str
    records: Path
    folder: Path
    cache: Path
    warmup: int
    steps: int
    global_batch_size: int


def train(job: Job) -> None:
    """Train, as one of two ranks."""
    work = Work(job.records, job.cache, job.global_batch_size)
    padded = job.variant == "padded"
    strategies: dict[str, Any] = {
        "padded": "ddp",
        "packed": "ddp",
        "separate": FlowTrainStrategy(encoder_ranks=1, placement="separate"),
        "colocated": FlowTrainStrategy(placement="colocated"),
    }
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategies[job.variant],
        max_steps=job.warmup + job.steps,
        use_distributed_sampler=False,
        callbacks=[Meter(job.folder, job.warmup)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    L.seed_everything(1, verbose=False)
    if padded:
        trainer.fit(PaddedVLM(job.module), PaddedData(work))
    else:
        trainer.fit(packed_module(job.module), work.data())
