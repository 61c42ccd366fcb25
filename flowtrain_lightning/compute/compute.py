"""The two computations of a step, alike in every placement: one encoder batch, one microbatch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER
from flowtrain_lightning.compute.step_metrics import MetricAccumulator
from flowtrain_lightning.data import Features, PackedBatch, PackedMedia
from flowtrain_lightning.parallel.random_streams import enter_stream, global_seed
from flowtrain_lightning.runtime.room import FeatureSpec

if TYPE_CHECKING:
    import lightning as L

    from flowtrain_lightning.module import FlowModule


class Compute:
    """Calls the user's methods with the right device, precision, random stream and logbook.

    Attributes:
        logbooks: one for each stage, since a name may be logged with other options in validation than in training.
        spec: what a row of features was found to be, for which room is reserved; None where nobody reserves any.
    """

    def __init__(self, module: FlowModule, trainer: L.Trainer, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.logbooks: defaultdict[str, MetricAccumulator] = defaultdict(MetricAccumulator)
        self.spec: FeatureSpec | None = None
        self._trainer = trainer
        self._convert_input = trainer.precision_plugin.convert_input

    def encode(self, media: PackedMedia, *, step: tuple[int, int], number: int) -> tuple[Tensor, ...]:
        """Features of one encoder batch, always as a tuple: ``[sum(media.rows), ...]`` each.

        Args:
            media: the encoder batch.
            step: epoch and step, which with ``number`` name the random stream.
            number: which encoder batch of the step it is, counted over all encoder ranks.

        Raises:
            TypeError: the user's ``encode`` returned no tensors.
            ValueError: it returned another number of rows than the plan promises, or rows that take more room than when
                it was first tried.
        """
        media = media.to(self.device, non_blocking=True)
        media = media.with_patches(self._convert_input(media.patches))
        enter_stream(global_seed(), ENCODER, *step, number)
        with self.module.logging_refused("encode"), self._own_half(ENCODER):
            output = self.module.encode(media)
        features = output if isinstance(output, tuple) else (output,)
        expected = sum(media.rows)
        for feature in features:
            if not isinstance(feature, Tensor):
                raise TypeError(
                    f"{type(self.module).__name__}.encode returned {_named(output)}; return a tensor with a row for "
                    "each backbone token of the media, or a tuple of such tensors."
                )
            if feature.shape[0] != expected:
                raise ValueError(
                    f"{type(self.module).__name__}.encode returned {feature.shape[0]} rows of features for "
                    f"{len(media.rows)} media, but their sizes promise {expected} (PackedMedia.rows). Check that the "
                    "encoder merges patches as the data module's image processor says."
                )
        if self.spec is not None and (found := FeatureSpec.of(features)).room(expected) > self.spec.room(expected):
            raise ValueError(
                f"{type(self.module).__name__}.encode returned features of {found}, but of {self.spec} when it was "
                "tried before the first step, in evaluation mode, to reserve room for them. Return as many tensors, as "
                "wide and of the same type, in training and in evaluation."
            )
        return features

    def microbatch(
        self, batch: PackedBatch, features: Features, *, stage: str, step: tuple[int, int], number: int
    ) -> Any:
        """The user's ``backbone_step``: the summed loss, or what it returns for predictions.

        The loss, its target tokens and the logged values go into the stage's logbook; the loss is returned to be
        differentiated.

        Raises:
            TypeError: a step with a loss returned something else than one summed loss and a number of tokens.
        """
        batch = batch.to(self.device, non_blocking=True)
        enter_stream(global_seed(), BACKBONE, *step, number)
        if stage == "predict":
            with self.module.logging_refused("predictions"), self._own_half(BACKBONE):
                return self.module.backbone_step(batch, features, stage)
        logbook = self.logbooks[stage]
        with self.module.logging_into(logbook), self._own_half(BACKBONE):
            loss, tokens = self._loss_and_tokens(self.module.backbone_step(batch, features, stage))
        logbook.close_microbatch(loss, tokens)
        return loss

    @contextmanager
    def _own_half(self, role: str) -> Iterator[None]:
        """Tells who meets weights without values that they are those of a half on other ranks."""
        try:
            yield
        except RuntimeError as error:
            absent = [name for name, parameter in self.module.named_parameters() if parameter.is_meta]
            if not absent or not re.search(r"\bmeta\b", str(error)):
                raise
            raise RuntimeError(
                f"What {type(self.module).__name__} computes on {role} ranks uses weights that other ranks hold, such "
                f"as {absent[0]!r}: {error} Encode with the encoder half alone and do all else with the backbone half; "
                "`halves` says which modules these are."
            ) from error

    def _loss_and_tokens(self, output: Any) -> tuple[Tensor, int | float | Tensor]:
        match output:
            case (Tensor() as loss, (int() | float() | Tensor()) as tokens) if loss.numel() == 1:
                if loss.is_meta:
                    raise RuntimeError("The loss is on device meta and has no value.")
                return loss, tokens
        raise TypeError(
            f"{type(self.module).__name__}.loss (or backbone_step) returned {_named(output)}; return a pair: the loss "
            "summed over the target tokens, a tensor of one element, and the number of these tokens."
        )

    def backward(self, outputs: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        """Backward of the outputs that have a gradient.

        It runs outside autocast, as PyTorch advises: each operation runs in the precision of its forward.
        """
        pairs = [
            (out, gradient)
            for out, gradient in zip(outputs, gradients, strict=True)
            if out.requires_grad and gradient is not None
        ]
        with torch.autocast(self.device.type, enabled=False):
            torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])


def _named(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_named, value))})"
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"


def as_features(modality: str, tensors: tuple[Tensor, ...]) -> Features:
    """What ``merge`` gets: a tensor, or a tuple where the encoder returned several."""
    return {modality: tensors[0] if len(tensors) == 1 else tensors}
