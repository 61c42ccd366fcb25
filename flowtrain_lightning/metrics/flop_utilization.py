"""Model FLOPs utilisation: which share of their peak devices spend on what training must compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flowtrain_lightning.allocator import BACKBONE, ENCODER
from flowtrain_lightning.metrics.plan_metric import PlanMetric
from flowtrain_lightning.packing import IntArray, StepPlan
from flowtrain_lightning.packing.cost_model import Observation
from flowtrain_lightning.placement.profile import FlopModel


class FlopUtilization(PlanMetric):
    """MFU as PaLM defines it (arXiv 2204.02311, appendix B), for every role and in all.

    The FLOPs are those of the real samples: attention within each sequence alone, what is frozen left out as autograd
    leaves it out, and nothing that is computed a second time.

    Args:
        flops: role -> FLOPs of its half by the lengths of what it computes, as `count_flops` counts them.
        ranks: role -> its global ranks.
        peak: FLOP/s of one rank's device on paper, in the precision of the run.
    """

    encoder: Tensor
    backbone: Tensor
    seconds: Tensor

    def __init__(self, flops: Mapping[str, FlopModel], ranks: Mapping[str, tuple[int, ...]], peak: float) -> None:
        super().__init__()
        self.flops, self.peak = dict(flops), peak
        self.devices = {role: len(ranks[role]) for role in (ENCODER, BACKBONE)}
        self.all_devices = len({rank for of_role in ranks.values() for rank in of_role})
        for name in (ENCODER, BACKBONE, "seconds"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)

    def update(self, plan: StepPlan, seconds: float) -> None:
        """See `PlanMetric`."""
        for members in _each(plan.microbatches):
            self.backbone += self._of(BACKBONE, plan.sizes.tokens[members])
        for items in _each(plan.encoder_batches):
            self.encoder += self._of(ENCODER, plan.sizes.media_patches[items])
        self.seconds += seconds

    def compute(self) -> dict[str, Tensor]:
        """``all``, ``encoder`` and ``backbone``, from 0 to 1."""
        own = {role: getattr(self, role) for role in self.devices}
        found = {"all": (self.encoder + self.backbone) / (self.seconds * self.peak * self.all_devices)}
        return found | {role: flops / (self.seconds * self.peak * self.devices[role]) for role, flops in own.items()}

    def _of(self, role: str, lengths: IntArray) -> float:
        return self.flops[role].of(Observation.of(lengths, 0.0)) if role in self.flops else 0.0


def _each(of_ranks: tuple[tuple[IntArray, ...], ...]) -> list[IntArray]:
    """The members of all microbatches, or encoder batches, that are not empty."""
    return [members for of_rank in of_ranks for members in of_rank if len(members)]
