"""A twin that runs: its model, and pictures that its encoder takes."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from flowtrain_lightning.models.family_traits import UntrainableError, whole_of
from flowtrain_lightning.models.twin import twin_config
from flowtrain_lightning.models.twin_pictures import Picture, twin_pictures, usual_processor
from flowtrain_lightning.packing_check.dispatch_modes import InFloat64


@dataclass(frozen=True)
class Twin:
    """A small model of a family, in float64.

    Attributes:
        config: its config.
        model: of ``transformers``, as it is there.
        pictures: three of them.
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
        UntrainableError: its forward takes no features that were computed elsewhere.
        Exception: whatever its classes raise of a smaller config, or of these pictures.
    """
    error: Exception | None = None
    for made_up in (True, False):
        twin = twin_config(config, small_images=made_up)
        if not made_up:
            _take_usual_images(twin)
        model = built(twin)
        if "mm_encoder_outputs" not in inspect.signature(whole_of(model).forward).parameters:
            raise UntrainableError(
                f"The forward of {type(whole_of(model)).__name__} takes no features that were computed elsewhere "
                "(mm_encoder_outputs), so that its encoder cannot be trained on ranks of its own."
            )
        try:
            with torch.device("cpu"), InFloat64():  # type: ignore[no-untyped-call]
                return Twin(twin, model, twin_pictures(model, twin, made_up=made_up), made_up)
        except Exception as raised:  # of pictures that it does not take
            error = raised
    assert error is not None
    raise error


def _take_usual_images(config: Any) -> None:
    """Lets a tower of one size take that of its family's image processor, in place; published sizes may differ."""
    from PIL import Image

    vision: Any = getattr(config, "vision_config", None)
    with suppress(Exception):  # then the config says what it takes
        values = usual_processor(config)([Image.new("RGB", (84, 60))], return_tensors="np")["pixel_values"]
        if isinstance(getattr(vision, "image_size", None), int) and values.shape[-1] == values.shape[-2]:
            vision.image_size = int(values.shape[-1])


def built(config: Any) -> Any:
    """A model of a twin's config, in float64, with numbers that hide nothing: none is 0, and none vanishes."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers import AutoModelForImageTextToText as Maker

    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UntrainableError(
            f"Models of type {config.model_type!r} are none of images and text: AutoModelForImageTextToText of "
            "transformers has no class for them."
        )
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Maker.from_config(config, dtype=torch.float64, trust_remote_code=False).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
            weight.copy_(0.1 * drawn) if weight.ndim > 1 else weight.add_(0.02 * drawn)
    return model.eval()
