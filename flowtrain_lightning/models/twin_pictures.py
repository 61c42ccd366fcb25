"""Pictures and clips of audio for a twin: by the model's own image processor, or made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from flowtrain_lightning.models.asked_images import AskedImages, asked_images
from flowtrain_lightning.models.encoder_inputs import (
    Arguments,
    PatchInputs,
    hears,
    image_arguments,
    sound_arguments,
)
from flowtrain_lightning.models.family_traits import rows_of, whole_of
from flowtrain_lightning.models.published_config import audio_token_id
from flowtrain_lightning.models.twin import patches_on_a_side

_SIZES = ((60, 84), (112, 60), (84, 84))
"""Height and width in pixels of pictures for an image processor."""

_FRAMES = (130, 205)
"""Of clips of audio: more than a tower's convolutions look at together, or Qwen3-Omni's would hear shorter clips
otherwise beside longer ones. What the tower makes of a clip alone counts here."""

_SHAPES = ((1, 1), (1, 2), (2, 1))
"""Of pictures of any size: how often the least number of patches lies along their height and width."""

_BUDGETS: Mapping[str, int] = {"max_soft_tokens": 70, "min_image_tokens": 4, "max_image_tokens": 16}
"""Settings of image processors that enlarge a picture until it fills a budget, and small budgets that are allowed."""


class Picture(NamedTuple):
    """A picture of a twin, or a clip of audio.

    Attributes:
        arguments: what the encoder takes of it.
        media: the same, to be packed.
    """

    arguments: Arguments
    media: LoadedMedia


def features_of(whole: Any, picture: Picture) -> tuple[Tensor, ...]:
    """The features of a picture or a clip by the model's own encoder, and those of deeper levels."""
    encode = getattr(whole, f"get_{picture.media.modality}_features")
    return rows_of(encode(**picture.arguments, return_dict=True))


def twin_clips(model: Any, config: Any) -> list[Picture]:
    """Clips of noise for a model that hears; none for others.

    Args:
        model: a twin.
        config: its config.

    Raises:
        Exception: whatever its encoder raises.
    """
    whole = whole_of(model)
    if not hears(whole) or audio_token_id(config) is None:
        return []
    found = []
    for number, frames in enumerate(_FRAMES):
        values = np.random.default_rng(number).standard_normal((frames, config.audio_config.num_mel_bins))
        media = LoadedMedia(values, (1, frames), 1, modality="audio")
        clip = Picture(sound_arguments(torch.from_numpy(values)), media)
        with torch.no_grad():
            rows = len(features_of(whole, clip)[0])
        found.append(clip._replace(media=media._replace(rows=rows)))
    return found


def twin_pictures(model: Any, config: Any, *, made_up: bool) -> list[Picture]:
    """Three pictures, of unlike sizes where the encoder takes these.

    Args:
        model: a twin.
        config: its config.
        made_up: in patches of noise; else by the image processor of the family.

    Raises:
        Exception: whatever its encoder raises.
    """
    error: Exception | None = None
    for make in (_of_patches, _of_whole_images) if made_up else (_of_processor,):
        try:
            return make(model, config)
        except Exception as raised:  # such as of a tower that has one size, though the model takes others
            error = error or raised
    assert error is not None
    raise error


def _of_patches(model: Any, config: Any) -> list[Picture]:
    inputs = PatchInputs.of(whole_of(model), config)
    return [_counted(model, inputs, media) for media in _made_up(config, any_size=inputs.any_size)]


def _of_whole_images(model: Any, config: Any) -> list[Picture]:
    inputs = PatchInputs.of(whole_of(model), config)
    inputs = replace(inputs, names=tuple(name for name in inputs.names if name != "image_sizes"))
    return [_counted(model, inputs, media) for media in _made_up(config, any_size=inputs.any_size)]


def _of_processor(model: Any, config: Any) -> list[Picture]:
    """As the family's image processor makes them by its usual settings."""
    from PIL import Image

    whole, images = whole_of(model), usual_images(model, config)
    found = []
    for number, (height, width) in enumerate(_SIZES):
        noise = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
        values = images.flat(images.given(Image.fromarray(noise))).astype(np.float64)
        media = LoadedMedia(values, images.size(height, width), 1, size=(height, width))
        (arguments,) = images.inputs.of_items(pack_media([media]))
        with torch.no_grad():
            rows = len(rows_of(whole.get_image_features(**arguments, return_dict=True))[0])
        found.append(Picture(arguments, media._replace(rows=rows)))
    return found


def usual_images(model: Any, config: Any) -> AskedImages:
    """Images by the image processor that ``transformers`` has for a family, with its usual settings.

    Raises:
        ValueError: it has none.
    """
    return asked_images(usual_processor(config), image_arguments(whole_of(model)), config)


def usual_processor(config: Any) -> Any:
    """The image processor that ``transformers`` has for a family, with its usual settings and the model's sizes.

    Raises:
        ImportError: it needs a library that is not installed.
        ValueError: there is none.
    """
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

    kinds = IMAGE_PROCESSOR_MAPPING.get(type(config), None)
    kinds = kinds if isinstance(kinds, dict) else {"": kinds}
    kind = kinds.get("pil") or next((kind for kind in kinds.values() if kind is not None), None)
    if kind is None:
        raise ValueError(f"transformers has no image processor for models of type {config.model_type!r}.")
    usual: Any = kind()
    return kind(**_geometry(usual, config))


def _geometry(processor: Any, config: Any) -> dict[str, Any]:
    """Settings by which an image processor makes what a model takes, where its usual ones are of another model."""
    vision = getattr(config, "vision_config", config)
    wanted = {
        "patch_size": getattr(vision, "patch_size", None),
        "merge_size": getattr(vision, "spatial_merge_size", None),
        "temporal_patch_size": getattr(vision, "temporal_patch_size", None),
    }
    found = {
        name: size for name, size in {**wanted, **_BUDGETS}.items() if _differs(getattr(processor, name, None), size)
    }
    if (pinpoints := getattr(config, "image_grid_pinpoints", None)) and hasattr(processor, "image_grid_pinpoints"):
        found["image_grid_pinpoints"] = pinpoints
    side = getattr(vision, "image_size", None)
    for name in ("size", "crop_size"):
        sides = getattr(processor, name, None)
        known = {edge for edge in ("height", "width", "shortest_edge", "longest_edge") if sides and _edge(sides, edge)}
        if isinstance(side, int) and known in ({"height", "width"}, {"shortest_edge"}):
            found[name] = dict.fromkeys(known, side)
    high = getattr(getattr(config, "high_res_vision_config", None), "image_size", None)
    if isinstance(high, int) and hasattr(processor, "high_res_size"):  # of a second tower
        found["high_res_size"] = {"height": high, "width": high}
    return found


def _edge(sides: Any, name: str) -> Any:
    return sides.get(name) if isinstance(sides, dict) else getattr(sides, name, None)


def _differs(one: Any, other: Any) -> bool:
    return isinstance(one, int) and isinstance(other, int) and one != other


def _made_up(config: Any, *, any_size: bool) -> list[LoadedMedia]:
    """Pictures of noise, in patches."""
    vision = getattr(config, "vision_config", config)
    side = _one(getattr(vision, "patch_size", 14))
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3
    square = _one(getattr(vision, "image_size", None) or 4 * side) // side
    found = []
    least = patches_on_a_side(config.to_dict())
    shapes = [(high * least, wide * least) if any_size else (square, square) for high, wide in _SHAPES]
    for number, grid in enumerate(shapes):
        patches = np.random.default_rng(number).standard_normal((grid[0] * grid[1], channels * side**2))
        found.append(LoadedMedia(patches, grid, 1, size=(grid[0] * side, grid[1] * side)))
    return found


def _counted(model: Any, inputs: PatchInputs, media: LoadedMedia) -> Picture:
    """With as many rows as the encoder makes of it, which say how its patches are ordered."""
    rows = 0
    for _ in range(2):
        rows, before = _rows(model, inputs, media._replace(rows=rows or len(media.pixels))), rows
        if rows == before:
            break
    media = media._replace(rows=rows)
    (arguments,) = inputs.of_items(pack_media([media]))
    return Picture(arguments, media)


@torch.no_grad()
def _rows(model: Any, inputs: PatchInputs, media: LoadedMedia) -> int:
    (arguments,) = inputs.of_items(pack_media([media]))
    return len(rows_of(whole_of(model).get_image_features(**arguments, return_dict=True))[0])


def _one(size: Any) -> int:
    return int(size[0] if isinstance(size, list | tuple) else size)
