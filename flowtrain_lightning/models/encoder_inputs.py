"""Makes the arguments of ``get_image_features`` of a Hugging Face model from packed media."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.data.batch import Tiles

Arguments = dict[str, Any]
"""Keyword arguments of ``get_image_features``."""

_SETTINGS = (
    *("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio", "interpolate_pos_encoding"),
    "downsample_mode",
)
_KNOWN = (*("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "pixel_mask", "batch_num_images"),)
_NOT_OF_IMAGES = ("kwargs", "return_dict", "output_hidden_states", "output_attentions")


class EncoderInputs(Protocol):
    """Makes of packed media what the encoder takes."""

    def of_items(self, media: PackedMedia) -> list[Arguments]:
        """The arguments for each media item, in order."""
        ...


def image_arguments(whole: Any) -> tuple[str, ...]:
    """Names of what ``get_image_features`` of a model takes of images, switches and settings left out."""
    names = inspect.signature(whole.get_image_features).parameters
    return tuple(name for name in names if name not in (*_SETTINGS, *_NOT_OF_IMAGES))


def sound_arguments(frames: Tensor) -> Arguments:
    """The arguments of ``get_audio_features`` for one clip.

    Args:
        frames: ``[frames, bands]`` of log-mel energies.
    """
    return {
        "input_features": frames.T[None],
        "feature_attention_mask": torch.ones(1, len(frames), dtype=torch.long, device=frames.device),
    }


def hears(whole: Any) -> bool:
    """Whether a model has ``get_audio_features`` of log-mel frames, of which a mask says how many a clip has."""
    known = getattr(whole, "get_audio_features", None)
    names = () if known is None else inspect.signature(known).parameters
    return {"input_features", "feature_attention_mask"} <= {*names}


def joined(arguments: Sequence[Arguments]) -> Arguments:
    """The arguments for several images in one call: along the first dimension, one after another.

    Where ``target_sizes`` says how large images are whose patches lie side by side, they go on along the last one.
    Images of unlike height, width and number of tiles get zeros below, at the right and behind, as image processors
    do it.

    Raises:
        RuntimeError: their shapes do not fit each other.
    """
    side_by_side = {"pixel_values"} if "target_sizes" in arguments[0] else set()
    several = {name: [each[name] for each in arguments] for name in arguments[0]}
    return {
        name: torch.cat(tensors, dim=-1) if name in side_by_side else _joined(tensors)
        for name, tensors in several.items()
    }


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    largest = [max(sides) for sides in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([pad(each, _missing(each, largest)) for each in tensors])


def _missing(tensor: Tensor, largest: Sequence[int]) -> list[int]:
    """What ``pad`` is told to add behind each dimension but the first, the last one first."""
    sides = reversed(list(zip(tensor.shape[1:], largest, strict=True)))
    return [number for side, most in sides for number in (0, most - side)]


@dataclass(frozen=True)
class PatchInputs:
    """Of images that `ImageProcessor` has cut into patches: by their grid, or whole again.

    Attributes:
        names: what ``get_image_features`` takes.
        frames: equal frames of a patch, for towers that take several together.
        channels: of an image.
    """

    names: tuple[str, ...]
    frames: int = 1
    channels: int = 3

    @classmethod
    def of(cls, whole: Any, config: Any) -> PatchInputs:
        """For a model.

        Args:
            whole: it has ``get_image_features``.
            config: the model's.

        Raises:
            ValueError: its images are something else than patches.
        """
        names = image_arguments(whole)
        if unknown := [name for name in names if name not in _KNOWN]:
            raise ValueError(
                f"get_image_features of {type(whole).__name__} takes {', '.join(unknown)}, which only the model's own "
                "image processor makes. Load the model from a folder that has it (preprocessor_config.json)."
            )
        vision = getattr(config, "vision_config", config)
        return cls(names, int(getattr(vision, "temporal_patch_size", 1) or 1))

    @property
    def any_size(self) -> bool:
        """Whether the encoder takes images of unlike sizes."""
        return "image_grid_thw" in self.names or ("image_sizes" in self.names and not self._tiled)

    @property
    def _tiled(self) -> bool:
        """Whether the encoder takes an image that is beside others in one tile, and else cuts it."""
        return "batch_num_images" in self.names

    def of_items(self, media: PackedMedia) -> list[Arguments]:
        """The arguments for each media item, in order."""
        counts = media.grid.prod(dim=1).tolist()
        items = zip(torch.split(media.patches, counts), media.grid.tolist(), media.rows, strict=True)
        return [self._arguments(patches, (high, wide), rows) for patches, (high, wide), rows in items]

    def _arguments(self, patches: Tensor, grid: tuple[int, int], rows: int) -> Arguments:
        if "image_grid_thw" in self.names:
            still = patches.view(len(patches), self.channels, 1, -1).expand(-1, -1, self.frames, -1)
            return {"pixel_values": still.flatten(1), "image_grid_thw": torch.tensor([[1, *grid]])}
        merge = max(math.isqrt(math.prod(grid) // rows), 1)
        image = _whole_image(patches, grid, merge, self.channels)
        found: Arguments = {"pixel_values": image[None]}
        if "image_sizes" in self.names:
            found["image_sizes"] = torch.tensor([list(image.shape[1:])])
        if "pixel_attention_mask" in self.names or self._tiled:
            found["pixel_values"] = image[None, None]
        if self._tiled:
            found["batch_num_images"] = torch.tensor([2])
        return found


def _whole_image(patches: Tensor, grid: tuple[int, int], merge: int, channels: int) -> Tensor:
    """``[channels, height, width]`` of patches in blocks of ``merge x merge``."""
    (high, wide), side = grid, math.isqrt(patches.shape[1] // channels)
    if high % merge or wide % merge:
        merge = 1
    blocks = patches.view(high // merge, wide // merge, merge, merge, channels, side, side)
    return blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(channels, high * side, wide * side)


@dataclass(frozen=True)
class AskedInputs:
    """Of images that the model's own image processor has made, whose values lie in rows one after another.

    Attributes:
        ask: height and width of an image in pixels -> all that its processor gives for one of that size; of pixels
            their shape.
        names: what ``get_image_features`` takes.
    """

    ask: Any
    names: tuple[str, ...]

    def of_items(self, media: PackedMedia) -> list[Arguments]:
        """The arguments for each media item, in order."""
        counts = media.grid.prod(dim=1).tolist()
        items = zip(torch.split(media.patches, counts), media.sizes, media.tiles or [None] * len(counts), strict=True)
        return [self._arguments(values, _between(self.ask(*size), tiles)) for values, size, tiles in items]

    def tiles_of(self, asked: Mapping[str, Any]) -> int:
        """Tiles of an image; 1 where its values are those of something else, too.

        Args:
            asked: all that the processor gives for it.
        """
        given = {name: asked[name] for name in self.names if isinstance(asked.get(name), Tensor)}
        pixels = [each for each in given.values() if each.is_floating_point()]
        along = tile_dimension(pixels[0])
        return int(pixels[0].shape[along]) if len(pixels) == 1 and along >= 0 else 1

    def _arguments(self, values: Tensor, asked: Mapping[str, Tensor]) -> Arguments:
        found: Arguments = {}
        begin, flat = 0, values.flatten()
        for name in self.names:
            like = asked.get(name)
            if not isinstance(like, Tensor):
                continue
            if like.is_floating_point():
                end = begin + like.numel()
                found[name], begin = flat[begin:end].view(like.shape), end
            else:
                found[name] = like.clone(memory_format=torch.contiguous_format)  # what is asked is kept
        return found


def tile_dimension(pixels: Tensor) -> int:
    """The dimension of tiles: before channels, height and width; negative where there is none."""
    return pixels.ndim - 4


def _between(asked: Mapping[str, Any], tiles: Tiles | None) -> Mapping[str, Any]:
    """The output of a processor for some tiles of an image; what has no entry for each tile stays, such as words."""
    if tiles is None or not tiles.before + tiles.behind:
        return asked
    along, whole = tile_dimension(asked["pixel_values"]), tiles.before + tiles.number + tiles.behind

    def has_tiles(each: Any) -> bool:
        return isinstance(each, Tensor) and each.ndim > along and each.shape[along] == whole

    return {
        name: each.narrow(along, tiles.before, tiles.number) if has_tiles(each) else each
        for name, each in asked.items()
    }
