"""A module whose halves take a time that is known: what their sizes cost by given cost models, slept."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from torch import Tensor

from flowtrain_lightning.data import PackedBatch, PackedMedia
from flowtrain_lightning.packing import CostModel
from tests.tiny import TinyVLM

BACKBONE_COST = CostModel(linear=2e-4, quadratic=2e-6, constant=4e-3)
ENCODER_COST = CostModel(linear=5e-5, quadratic=0.0, constant=6e-3)


class SlowVLM(TinyVLM):
    """Sleeps in forward; what it computes beside that takes about a millisecond."""

    steps = 0

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        time.sleep(ENCODER_COST.of_set(np.diff(media.cu_seqlens.numpy())))
        return super().encode(media)

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> Any:
        type(self).steps += 1
        time.sleep(BACKBONE_COST.of_set(np.diff(batch.cu_seqlens.numpy())))
        return super().backbone_step(batch, features, stage)
