"""Pictures for a twin: as the model's own image processor makes them, or made up where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from flowtrain_lightning.data.loaded_media import LoadedMedia
from flowtrain_lightning.data.collate import pack_media
from flowtrain_lightning.models.encoder_inputs import Arguments, PatchInputs
from flowtrain_lightning.models.family_traits import rows_of, whole_of

_GRIDS = ((4, 4), (4, 8), (8, 4))
"""Patches along the height and width of pictures of any size."""


class Picture(NamedTuple):
    """A picture of a twin.

    Attributes:
        arguments: what the encoder takes of it.
        media: the same, to be packed.
    """

    arguments: Arguments
    media: LoadedMedia


def twin_pictures(model: Any, config: Any) -> list[Picture]:
    """Three pictures, of unlike sizes where the encoder takes these.

    Args:
        model: a twin.
        config: its config.

    Raises:
        Exception: whatever its encoder raises.
    """
    inputs, error = PatchInputs.of(whole_of(model), config), None
    for tried in (inputs, replace(inputs, names=tuple(name for name in inputs.names if name != "image_sizes"))):
        try:
            return [_counted(model, tried, media) for media in _made_up(config, any_size=tried.any_size)]
        except Exception as raised:  # such as of a tower that has one size, though the model takes others
            error = error or raised
    raise error or AssertionError


def _made_up(config: Any, *, any_size: bool) -> list[LoadedMedia]:
    """Pictures of noise, in patches."""
    vision = getattr(config, "vision_config", config)
    side = _one(getattr(vision, "patch_size", 14))
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3
    square = _one(getattr(vision, "image_size", None) or 4 * side) // side
    found = []
    for number, grid in enumerate(_GRIDS if any_size else ((square, square),) * len(_GRIDS)):
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
