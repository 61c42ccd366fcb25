"""Families that no class here names, small as a certificate's twin, with images as they want them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from PIL import Image

from flowtrain_lightning.data import ImageProcessor
from flowtrain_lightning.models import AnyVLM
from flowtrain_lightning.models.built_twin import twin_of
from flowtrain_lightning.models.family_traits import rows_of, whole_of
from flowtrain_lightning.models.published_config import usual_config
from flowtrain_lightning.models.twin_pictures import usual_images
from tests.models.tiny import FAMILIES, Family
from tests.tiny import CharTokenizer

_IMAGE = CharTokenizer.specials.index("<|image_pad|>")
_TOKENS = ("image_token_id", "image_token_index")

WITHOUT_A_CLASS = ("cosmos3_omni", "llava_next", "idefics3", "qwen3_5")
"""With levels of features for deeper layers; tiles, and a row of the encoder's own at the end of a line; pictures in a
sequence of tiles; scans between layers of attention."""


@cache
def family_of(name: str) -> Family:
    """A family of `FAMILIES`, or one that `AnyVLM` trains."""
    if name in FAMILIES:
        return FAMILIES[name]
    twin = twin_of(usual_config(name))
    config = twin.config.to_dict()
    config |= {token: _IMAGE for token in _TOKENS if token in config}
    config["text_config"] |= {"bos_token_id": None, "eos_token_id": 0}
    return Family(AnyVLM, config, _of_patches(twin) if twin.made_up else _of_processor(twin))


def _of_patches(twin: Any) -> ImageProcessor:
    vision, (first, *_) = twin.config.vision_config, twin.pictures
    high, wide = first.media.grid
    merge = round((high * wide / first.media.rows) ** 0.5)
    any_size = "image_grid_thw" in first.arguments
    side = vision.patch_size
    return ImageProcessor(
        patch_size=side,
        merge_size=merge,
        **({"min_pixels": (side * merge) ** 2, "max_pixels": 8 * (side * merge) ** 2} if any_size else {}),
        **({} if any_size else {"fixed_size": (high * side, wide * side)}),
    )


def _of_processor(twin: Any) -> ImageProcessor:
    images = usual_images(twin.model, twin.config)
    whole = whole_of(twin.model)

    @cache
    @torch.no_grad()
    def count(height: int, width: int) -> int:
        given = images.given(Image.new("RGB", (width, height)))
        made = {name: given[name] for name in images.names if isinstance(given.get(name), torch.Tensor)}
        made = {name: each.double() if each.is_floating_point() else each for name, each in made.items()}
        return len(rows_of(whole.get_image_features(**made, return_dict=True))[0])

    return replace(images, count=count)
