"""Whether a family trains here as in Hugging Face: a twin in two halves, packed, beside the whole model, one by one."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flowtrain_lightning.compute.random_layers import dropout_settings
from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch
from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from flowtrain_lightning.models.built_twin import twin_of
from flowtrain_lightning.models.checked_twin import fitting
from flowtrain_lightning.models.family_traits import all_seen
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM
from flowtrain_lightning.models.trained_weights import add_adapters
from flowtrain_lightning.models.twin_samples import TwinSample, packed, twin_samples
from flowtrain_lightning.models.untrainable import UntrainableError, raised, told_as
from flowtrain_lightning.packing_check.checked_module import default_dtype
from flowtrain_lightning.packing_check.dispatch_modes import InFloat64
from flowtrain_lightning.packing_check.passes import relative_errors
from flowtrain_lightning.parallel.halves import role_of

EXACT = 1e-9
"""Relative error of a loss or a gradient in float64 up to which two ways of computing it are one."""

ROUNDED = 1e-6
"""The same where code of ``transformers`` rounds to float32 on its way."""

_NO_NUMBER = sys.float_info.max
"""Stands for an error that is NaN or infinite, which is no JSON."""

_PADDING = 5


@dataclass(frozen=True)
class Certificate:
    """The outcome of the comparison.

    Attributes:
        family: ``model_type``.
        module: class that trains it; empty of a family without a class of its own that could not be compared.
        trains: whether it does.
        error: the largest relative error of the loss, features and gradients; None where nothing could be computed.
        where: the tensor with that error.
        half: whose it is, ``"encoder"`` or ``"backbone"``.
        leak: how far gradients of a sample moved, relative to them, when another sample was changed.
        reason: a sentence; empty where it trains.
        raised: the exception of the family's own code that lies behind it, if one does.
        seconds: of cores that it took.
    """

    family: str
    module: str
    trains: bool
    error: float | None = None
    where: str = ""
    half: str = ""
    leak: float | None = None
    reason: str = ""
    raised: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """In a few words: exact, within so much, refused, or not compared."""
        if not self.trains:
            return "not compared" if self.is_unproven else "refused"
        assert self.error is not None
        return "exact" if self.error <= EXACT else f"within {self.error:.0e}"

    @property
    def is_unproven(self) -> bool:
        """A class of its own trains the family, but no twin of it could be compared."""
        return not self.trains and self.error is None and bool(self.module)

    @property
    def sentence(self) -> str:
        """All that is to be said."""
        if self.is_unproven:
            return (
                f"{self.family} was not compared, so nothing is proven: {self.reason} {self.module} trains it, and the "
                "packing check looks at the module itself before its first step."
            )
        if not self.trains:
            return f"{self.family} is refused: {self.reason}"
        return (
            f"{self.family} trains: a twin in two halves, packed, has the loss and gradients of Hugging Face's whole "
            f"model sample by sample ({self.verdict}; largest relative error {self.error:.1e}, {self.where}), and no "
            f"sample's gradients move with another's ({self.leak:.0e})."
        )

    def as_data(self) -> dict[str, Any]:
        """For files."""
        return {**asdict(self), "verdict": self.verdict}


def certify(config: Any, kind: type[HuggingFaceVLM], settings: Mapping[str, Any] | None = None) -> Certificate:
    """Compares a twin of a model, trained in two halves from packed samples, with Hugging Face's own whole one.

    Args:
        config: of ``transformers``, of the model itself.
        kind: the class that trains it.
        settings: arguments of that class.
    """
    start, family = time.process_time(), config.model_type
    try:
        with told_as("Its twin could not be trained in halves beside Hugging Face's whole model"):
            found = _Comparison(config, kind, dict(settings or {})).run()
    except UntrainableError as error:
        module = kind.__name__ if family in kind.families else ""
        found = Certificate(family, module, False, reason=str(error), raised=raised(error))
    return Certificate(**{**asdict(found), "seconds": time.process_time() - start})


class _Comparison:
    """A module of a twin and Hugging Face's own model with the same weights, on the same samples."""

    def __init__(self, config: Any, kind: type[HuggingFaceVLM], settings: Mapping[str, Any]) -> None:
        self._family, self._kind = config.model_type, kind
        with torch.device("cpu"), default_dtype(torch.float64):
            twin = twin_of(config)
            self._own, self._samples = twin.model, twin_samples(twin.config, twin.pictures)
            self._module = kind(twin.config, **fitting(settings, self._own))
            self._module.configure_model()
            if (adapters := self._module.hparams["adapters"]) is not None:
                add_adapters(self._own, adapters)
        self._module.double()
        for layer in (*self._own.modules(), *self._module.modules()):
            for name in dropout_settings(layer):  # as of adapters; other layouts draw other numbers
                setattr(layer, name, 0.0)
        self._share_weights()
        self._own.train()

    def _share_weights(self) -> None:
        """Gives the module the numbers of Hugging Face's model, and freezes there what it froze."""
        ours = {_plain(name): weight for name, weight in self._module.model.named_parameters()}
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, weight in self._own.named_parameters():
                if not weight.any():  # adapters begin with zeros, which would hide what lies behind them
                    weight.copy_(0.1 * torch.randn(weight.shape, generator=draw, dtype=torch.float64))
                ours[name].copy_(weight)
                weight.requires_grad_(ours[name].requires_grad)

    def run(self) -> Certificate:
        with InFloat64():  # type: ignore[no-untyped-call]
            expected_loss, expected = self._one_by_one()
            found_loss, found = self._in_halves(self._samples)
            of_loss = abs(found_loss - expected_loss) / max(abs(expected_loss), 1e-300)
            errors = {**relative_errors(expected, found), "the loss": of_loss, **self._tower_errors()}
            leak = self._leak()
        errors = {name: _number(error) for name, error in errors.items()}
        where = max(errors, key=lambda name: errors[name])
        return self._judged(errors[where], where, leak)

    def _judged(self, error: float, where: str, leak: float) -> Certificate:
        role = role_of(f"model.{where}", self._module.halves) or "backbone"
        half = "encoder" if where.startswith("features") else role.partition("_")[0]
        trains = error <= ROUNDED and leak <= EXACT
        reason = ""
        if error == _NO_NUMBER:
            reason = f"packed and in halves, or in Hugging Face's own model, {where} of the {half} is NaN or infinite."
        elif error > ROUNDED:
            reason = (
                f"packed and in halves, {where} of the {half} is {error:.1e} off what Hugging Face's whole model has "
                "sample by sample."
            )
        elif leak > EXACT:
            reason = f"a sample's gradients move by {leak:.1e} with the words and pictures of another."
        return Certificate(self._family, self._kind.__name__, trains, error, where, half, leak, reason)

    def _one_by_one(self) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of Hugging Face's model, from pixels on, one sample after another."""
        total = 0.0
        self._own.zero_grad(set_to_none=True)
        for sample in self._samples:
            batch = sample.batch
            given = {"input_ids": batch.tokens[None], "use_cache": False}
            given |= {**self._module.token_kinds(batch), **all_seen(self._own, batch.tokens), **sample.arguments}
            loss = _cross_entropy(self._own(**given).logits[0], batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total, _gradients(self._own)

    def _in_halves(self, samples: Sequence[TwinSample]) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of the module: all pictures in one encoder batch, all samples in one microbatch."""
        module = self._module
        module.zero_grad(set_to_none=True)
        made = self._encoded(samples)
        leaves = {
            kind: tuple(rows.detach().requires_grad_(rows.is_floating_point()) for rows in levels)
            for kind, levels in made.items()
        }
        loss, _ = module.backbone_step(packed(samples, _PADDING), _as_features(leaves), "train")
        loss.backward()
        reached = [
            (rows, leaf.grad)
            for kind, levels in made.items()
            for rows, leaf in zip(levels, leaves[kind], strict=True)
            if leaf.grad is not None and rows.requires_grad
        ]
        if reached:
            torch.autograd.backward([rows for rows, _ in reached], [gradient for _, gradient in reached])
        return float(loss.detach()), _gradients(module.model)

    def _encoded(self, samples: Sequence[TwinSample]) -> dict[str, tuple[Tensor, ...]]:
        """Modality -> features of all media of samples, encoded together."""
        media = [picture.media for sample in samples for picture in sample.pictures]
        kinds = sorted({item.modality for item in media})
        return {kind: self._encode([item for item in media if item.modality == kind]) for kind in kinds}

    def _encode(self, media: Sequence[LoadedMedia]) -> tuple[Tensor, ...]:
        made = self._module.encode(pack_media(media))
        return made if isinstance(made, tuple) else (made,)

    @torch.no_grad()
    def _tower_errors(self) -> dict[str, float]:
        """Measures how far features made together are from those made one by one."""
        media = [picture.media for sample in self._samples for picture in sample.pictures]
        found: dict[str, float] = {}
        for kind, together in self._encoded(self._samples).items():
            alone = [self._encode([item]) for item in media if item.modality == kind]
            expected = [torch.cat(level) for level in zip(*alone, strict=True)]
            for level, (one, other) in enumerate(zip(expected, together, strict=True)):
                error = float((one - other).abs().max() / one.abs().max().clamp(min=1e-300))
                found[f"features {level} of {kind}"] = error
        return found

    def _leak(self) -> float:
        """The largest relative change of what one sample teaches, while the words and pictures of others change."""
        worst, before = 0.0, self._of_samples(self._samples)
        for changed in range(len(self._samples)):
            samples = [each.changed() if n == changed else each for n, each in enumerate(self._samples)]
            after = self._of_samples(samples)
            for number, (one, other) in enumerate(zip(before, after, strict=True)):
                if number != changed:
                    worst = max(worst, _number(float((one - other).norm() / one.norm().clamp(min=1e-300))))
        return worst

    def _of_samples(self, samples: Sequence[TwinSample]) -> list[Tensor]:
        """Of each sample, the gradients of the embeddings that its decoder is given, in one microbatch."""
        module, batch = self._module, packed(samples, _PADDING)
        with torch.no_grad():
            made = self._encoded(samples)
        arguments = module.merge(batch, _as_features(made))
        arguments["inputs_embeds"] = arguments["inputs_embeds"].detach().requires_grad_()
        decoder = module.get_submodule(module.halves["backbone"][0])
        loss, _ = module.loss(decoder(**arguments), batch)
        (gradient,) = torch.autograd.grad(loss, arguments["inputs_embeds"])
        lengths = [len(sample.sequence) for sample in samples]
        return list(gradient[0, : sum(lengths)].split(lengths))


def _number(error: float) -> float:
    """The error itself; NaN would be above no bound."""
    return error if math.isfinite(error) else _NO_NUMBER


def _as_features(made: Mapping[str, tuple[Tensor, ...]]) -> dict[str, Tensor | tuple[Tensor, ...]]:
    return {kind: levels[0] if len(levels) == 1 else levels for kind, levels in made.items()}


def _cross_entropy(logits: Tensor, batch: PackedBatch) -> Tensor:
    return functional.cross_entropy(logits, batch.labels, ignore_index=IGNORED_LABEL, reduction="sum")


def _gradients(model: Any) -> dict[str, Tensor]:
    return {_plain(name): weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _plain(name: str) -> str:
    """The name by which ``transformers`` knows a parameter that was given a module to lie in."""
    if "parametrizations." not in name:
        return name
    owner, _, inner = name.partition("parametrizations.")
    return owner + inner.removesuffix(".original")
