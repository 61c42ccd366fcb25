"""Samples, tokens and media items per second."""

from __future__ import annotations

import torch
from torch import Tensor

from flowtrain_lightning.metrics.plan_metric import PlanMetric
from flowtrain_lightning.packing import StepPlan


class Throughput(PlanMetric):
    """What all ranks together train on per second."""

    samples: Tensor
    tokens: Tensor
    media_items: Tensor
    seconds: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("samples", "tokens", "media_items", "seconds"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)

    def update(self, plan: StepPlan, seconds: float) -> None:
        """See `PlanMetric`."""
        self.samples += len(plan.samples)
        self.tokens += int(plan.sizes.tokens.sum())
        self.media_items += len(plan.sizes.media_patches)
        self.seconds += seconds

    def compute(self) -> dict[str, Tensor]:
        """``samples_per_second``, ``tokens_per_second`` and ``media_items_per_second``."""
        return {
            f"{name}_per_second": getattr(self, name) / self.seconds for name in ("samples", "tokens", "media_items")
        }
