"""A twin that runs: its model, and pictures that its encoder takes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from flowtrain_lightning.models.family_traits import whole_of
from flowtrain_lightning.models.twin import twin_config
from flowtrain_lightning.models.twin_pictures import Picture, twin_clips, twin_pictures
from flowtrain_lightning.models.untrainable import UntrainableError, told_as
from flowtrain_lightning.packing_check.dispatch_modes import InFloat64

_MOST_WEIGHTS = 20_000_000
_NO_PICTURES = "No pictures could be made that the encoder of a small model takes"


@dataclass(frozen=True)
class Twin:
    """A small model of a family, in float64.

    Attributes:
        config: its config.
        model: of ``transformers``, as it is there.
        pictures: three of them; behind them clips of audio, of a model that hears.
        made_up: the pictures are noise in patches; else the family's image processor has made them.
    """

    config: Any
    model: Any
    pictures: list[Picture]
    made_up: bool


def twin_of(config: Any) -> Twin:
    """A twin of a model: with small images where its encoder takes patches, else with those of its image processor.

    Args:
        config: the model's.

    Raises:
        UntrainableError: no smaller model can be built or given pictures, or its forward takes no features that were
            computed elsewhere; says which.
    """
    error: UntrainableError | None = None
    for made_up, small in ((True, True), (False, True), (False, False)):
        with told_as("No small model of this config can be built"):
            twin = twin_config(config, small_images=small)
            model = built(twin)
        if "mm_encoder_outputs" not in inspect.signature(whole_of(model).forward).parameters:
            raise UntrainableError(
                f"The forward of {type(whole_of(model)).__name__} takes no features that were computed elsewhere "
                "(mm_encoder_outputs), so that its encoder cannot be trained on ranks of its own."
            )
        try:
            with torch.device("cpu"), InFloat64(), told_as(_NO_PICTURES):  # type: ignore[no-untyped-call]
                pictures = [*twin_pictures(model, twin, made_up=made_up), *twin_clips(model, twin)]
                return Twin(twin, model, pictures, made_up)
        except UntrainableError as raised:  # of pictures that it does not take
            error = raised
    assert error is not None
    raise error


def built(config: Any) -> Any:
    """A model of a twin's config, in float64, with numbers that hide nothing: none is 0, and none vanishes."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers import AutoModelForImageTextToText as Maker

    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UntrainableError(
            f"Models of type {config.model_type!r} are none of images and text: AutoModelForImageTextToText of "
            "transformers has no class for them."
        )
    with torch.device("meta"):
        _refuse_large(Maker.from_config(config, trust_remote_code=False))
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Maker.from_config(config, dtype=torch.float64, trust_remote_code=False).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
            weight.copy_(0.1 * drawn) if weight.ndim > 1 else weight.add_(0.02 * drawn)
    return model.eval()


def _refuse_large(model: Any) -> None:
    """Refuses a twin that would take minutes, as of a tower whose config only names another library's model."""
    if (weights := model.num_parameters()) > _MOST_WEIGHTS:
        parts = {
            name: sum(weight.numel() for weight in part.parameters()) for name, part in whole_of(model).named_children()
        }
        largest = max(parts, key=lambda name: parts[name])
        raise UntrainableError(
            f"A small model of it still has {weights / 1e6:.0f} million weights, most of them in its {largest}, whose "
            "size its config does not say, so that it cannot be compared within a minute."
        )
