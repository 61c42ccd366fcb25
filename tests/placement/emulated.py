"""A module whose halves take a time that is known: a clock of its own goes on by what their sizes cost."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from flowtrain_lightning.data import PackedBatch, PackedMedia
from flowtrain_lightning.packing import CostModel
from tests.tiny import TinyVLM

BACKBONE_COST = CostModel(linear=2e-4, quadratic=2e-6, constant=4e-3)
ENCODER_COST = CostModel(linear=5e-5, quadratic=0.0, constant=6e-3)


class Clock:
    """Stands for the clock of the profiler; every seventh time that something runs, a hiccup trebles its time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.runs = 0

    def now(self, device: object) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.runs += 1
        self.seconds += 3 * seconds if self.runs % 7 == 0 else seconds


class EmulatedVLM(TinyVLM):
    """Its forwards take what the cost models above say, by this clock; all else takes no time."""

    clock = Clock()
    microbatches = 0

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        self.clock.pass_by(ENCODER_COST.of_set(np.diff(media.cu_seqlens.numpy())))
        return super().encode(media)

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> Any:
        type(self).microbatches += 1
        self.clock.pass_by(BACKBONE_COST.of_set(np.diff(batch.cu_seqlens.numpy())))
        return super().backbone_step(batch, features, stage)
