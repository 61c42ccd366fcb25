"""LLaVA-OneVision's images: one alone in its record is cut into tiles, several are padded to one square tile each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.models.huggingface_images import HuggingFaceImages

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class OnevisionImages(HuggingFaceImages):
    """What LLaVA-OneVision's image processor does, and how many rows of features its model makes of it.

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
        """What the encoder sees of an image, tile below tile: ``[height, width, channels]`` normalised values."""
        if (image.height, image.width) != size:
            image = image.resize((size[1], size[0]))  # the plan counts on the padding of the original
        return super().values(image, grid, size)

    def processed(self, image: Image, grid: tuple[int, int]) -> Any:
        """``[..., channels, height, width]`` the tiles, by Hugging Face's image processor."""
        if grid[0] != grid[1]:
            return super().processed(image, grid)
        # It pads to one square tile where a record has several images.
        return self.processor([[image, image]], return_tensors="np", **self.options)["pixel_values"][:1]
