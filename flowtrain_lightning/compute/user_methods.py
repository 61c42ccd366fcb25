"""`UserMethods`: the protocol by which a step knows the user's module."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from flowtrain_lightning.compute.step_metrics import MetricAccumulator
from flowtrain_lightning.data import Features, PackedBatch, PackedMedia, PackedTargets
from flowtrain_lightning.parallel.halves import HalvedModule
from flowtrain_lightning.parallel.stages.stage_forward import StageForward


class UserMethods(HalvedModule, Protocol):
    """The methods of the user's module that a step calls; `FlowModule` has them."""

    loss_weights: Mapping[str, float]

    @property
    def staged(self) -> Mapping[str, StageForward]:
        """Role -> runs the stage of it that this rank holds; without those of which it has all layers, or none."""

    def encode(self, media: PackedMedia) -> Tensor | tuple[Tensor, ...]:
        """Packed media of one modality -> features."""

    def backbone_step(self, batch: PackedBatch, features: Features, stage: str) -> Any:
        """One microbatch -> summed loss and number of target tokens, or a prediction."""

    def generator_loss(self, items: PackedTargets, condition: Any) -> tuple[Tensor, int | Tensor]:
        """Items to be generated, and rows of the backbone's outputs -> summed loss and number of values."""

    def logging_into(self, metrics: MetricAccumulator) -> AbstractContextManager[None]:
        """Inside, ``log`` collects into ``metrics``."""

    def logging_refused(self, where: str) -> AbstractContextManager[None]:
        """Inside, ``log`` raises."""
