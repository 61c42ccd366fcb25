"""Pixels as Hugging Face's image processors make them for towers that take tiles of one size, and those tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowtrain_lightning.data import ImageProcessor, PackedMedia
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.media.image_files import ImageError, read_header
from flowtrain_lightning.data.media.media_files import MediaFile

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class HuggingFaceImages(ImageProcessor):
    """Crops, tiles, scales and normalises images by the model's own processor.

    ``fixed_size`` is that of a tile, and ``merge_size ** 2`` patches of it become one row of features. The tiles of an
    image stand one below the other, in the processor's order, so that its grid is as wide as one tile and as high as
    all of them; `tile_images` takes them apart again.

    Attributes:
        settings: of the processor, for comparing.
        processor: the image processor of Hugging Face.
        options: what the model's processor tells it at every call.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    processor: Any = field(default=None, repr=False, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever some image would become something else."""
        rule = [self.patch_size, self.merge_size, self.fixed_size, dict(self.options)]
        return fingerprint([type(self.processor).__name__, dict(self.settings), *rule])

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the tiles of an image; (0, 0) where it is not cut."""
        if not hasattr(self.processor, "max_image_size"):
            return 0, 0
        _, high, wide = self.processor.get_number_of_image_patches(height, width)
        return int(high), int(wide)

    def tiles_of(self, file: MediaFile) -> tuple[int, int]:
        """Rows and columns of the tiles of an image, from its header."""
        header = read_header(file)
        return self.tiles(header.height, header.width)

    def tiles_in(self, grid: tuple[int, int], size: tuple[int, int]) -> int:
        """Tiles of an image, that of the whole one among them."""
        return grid[0] // super().size(*size)[0]

    def size(self, height: int, width: int, *, alone: bool = True) -> tuple[int, int]:
        """Height and width in patches of all tiles of an image of ``height x width`` pixels.

        Raises:
            ImageError: the image has no pixels, or is so long and thin that the processor would swell it beyond bounds.
        """
        high, wide = super().size(height, width)
        _refuse_swollen(height, width, self._swollen(height, width, alone=alone))
        return high * self._count(height, width), wide

    def _swollen(self, height: int, width: int, *, alone: bool) -> int:
        """Pixels that the processor makes of an image before it crops, where they are more for a thinner one."""
        del alone
        shortest = self.settings.get("size", {}).get("shortest_edge")
        if shortest is None:
            return 0
        if self.settings.get("do_pad"):  # to a square
            return max(height, width) ** 2
        return int(shortest) ** 2 * max(height, width) // min(height, width)

    def values(self, image: Image, grid: tuple[int, int], size: tuple[int, int]) -> NDArray[np.float32]:
        """Make an image's pixels for the encoder, tile below tile: ``[height, width, channels]`` normalised values."""
        if (image.height, image.width) != size and grid != self.size(image.height, image.width):
            image = image.resize((size[1], size[0]))  # the plan counts on the tiles of the original
        found = self.processed(image, grid)
        high, wide = (side // self.patch_size * self.patch_size for side in found.shape[-2:])
        tiles = np.asarray(found, dtype=np.float32).reshape(-1, *found.shape[-3:])[..., :high, :wide]
        return np.ascontiguousarray(tiles.transpose(0, 2, 3, 1)).reshape(-1, wide, self.channels)

    def processed(self, image: Image, grid: tuple[int, int]) -> Any:
        """``[..., channels, height, width]`` the tiles, by Hugging Face's image processor."""
        return self.processor(image, return_tensors="np", **self.options)["pixel_values"]

    def _count(self, height: int, width: int) -> int:
        if hasattr(self.processor, "crop_to_patches"):
            return int(self.processor.get_number_of_image_patches(height, width, dict(self.options)))
        high, wide = self.tiles(height, width)
        return high * wide + 1


def _refuse_swollen(height: int, width: int, pixels: int) -> None:
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise ImageError(
            f"it is {height} pixels high and {width} wide, of which the model's image processor would make {pixels} "
            f"pixels before it crops them, more than {limit}; cut it into pieces, or raise PIL.Image.MAX_IMAGE_PIXELS"
        )


@dataclass(frozen=True)
class OnevisionImages(HuggingFaceImages):
    """LLaVA-OneVision's image processor, and the number of rows of features that its model makes.

    Attributes:
        most_tiles: rows of features of an image are scaled down to about those of so many tiles.
    """

    most_tiles: int = 9

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever some image would become something else, or other rows of features."""
        return fingerprint([super().fingerprint, self.most_tiles])

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the tiles of an image that is alone."""
        from transformers.image_processing_utils import select_best_resolution

        high, wide = select_best_resolution((height, width), self.processor.image_grid_pinpoints)
        assert self.fixed_size is not None, "tiles have a size"
        return high // self.fixed_size[0], wide // self.fixed_size[1]

    def size(self, height: int, width: int, *, alone: bool = True) -> tuple[int, int]:
        """Height and width in patches of all tiles of an image, the first of which is the whole image.

        Raises:
            ImageError: the image has no pixels, or is so long and thin that the processor would swell it beyond bounds.
        """
        high, wide = super().size(height, width, alone=alone)
        return (high, wide) if alone else (wide, wide)

    def _swollen(self, height: int, width: int, *, alone: bool) -> int:
        """Pixels of the square that the processor pads one of several images to."""
        return 0 if alone else max(height, width) ** 2

    def rows_of_features(self, grid: tuple[int, int], size: tuple[int, int]) -> int:
        """A row per patch of the whole image, those of the other tiles less their padding, and one at each line's end.

        As ``LlavaOnevisionProcessor`` counts them.
        """
        side = grid[1]
        if grid[0] == side:
            return side**2 + 1
        (down, across), (height, width) = self.tiles(*size), size
        high, wide = down * side, across * side
        if width / height > wide / high:
            high -= (high - int(round(height * (wide / width), 7))) // 2 * 2
        else:
            wide -= (wide - int(round(width * (high / height), 7))) // 2 * 2
        shrink = math.sqrt(high * wide / (self.most_tiles * side**2))
        if shrink > 1.1:
            high, wide = int(high // shrink), int(wide // shrink)
        return side**2 + high * (wide + 1)

    def values(self, image: Image, grid: tuple[int, int], size: tuple[int, int]) -> NDArray[np.float32]:
        """Make an image's pixels for the encoder, tile below tile: ``[height, width, channels]`` normalised values."""
        if (image.height, image.width) != size:
            image = image.resize((size[1], size[0]))  # the plan counts on the padding of the original
        return super().values(image, grid, size)

    def processed(self, image: Image, grid: tuple[int, int]) -> Any:
        """``[..., channels, height, width]`` the tiles, by Hugging Face's image processor."""
        if grid[0] != grid[1]:
            return super().processed(image, grid)
        # It pads to one square tile where a record has several images.
        return self.processor([[image, image]], return_tensors="np", **self.options)["pixel_values"][:1]


def tile_images(media: PackedMedia, high: int) -> Tensor:
    """The tiles of all images, one after another, from images whose tiles stand one below the other.

    Args:
        media: images as `HuggingFaceImages` makes them.
        high: patches along the height of a tile.

    Returns:
        ``[tiles, channels, height, width]``, in pixels.
    """
    counts = [int(down) // high for down in media.grid[:, 0]]
    wide = int(media.grid[0, 1])
    grid = torch.tensor([[high, wide]] * sum(counts))
    rows = [rows // count for rows, count in zip(media.rows, counts, strict=True) for _ in range(count)]
    return replace(media, grid=grid, rows=tuple(rows)).images()
