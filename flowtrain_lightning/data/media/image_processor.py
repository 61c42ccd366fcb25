"""Images at their native sizes: how large each becomes, and its pixels as patches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.batch import Tiles
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.media.image_files import ImageError, decode, flatten
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from flowtrain_lightning.data.media.media_files import MediaFile
from flowtrain_lightning.packing.setting_values import check_settings

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST_ASPECT = 200
"""Largest ratio of an image's sides, by Qwen's rule."""


@dataclass(frozen=True)
class ImageProcessor:
    """The size rule of Qwen2-VL, Qwen2.5-VL and (with ``patch_size=16``) Qwen3-VL, and the pixels that follow from it.

    An image keeps its aspect ratio, unless ``fixed_size`` makes all alike; both sides become multiples of
    ``patch_size * merge_size``. Patches are ordered in blocks of ``merge_size x merge_size``, the blocks from left to
    right and downward, so an encoder merges ``merge_size ** 2`` consecutive patches into one row of features. Inside a
    patch the order is channel, height, width. Transparent images are laid on white.

    Attributes:
        patch_size: side of a patch in pixels.
        merge_size: side of a block of patches that becomes one row of features.
        min_pixels: smaller images are scaled up to about this many pixels.
        max_pixels: larger images are scaled down to at most this many pixels.
        channels: 3 for colour, 1 for grey.
        mean: per channel, subtracted from values in 0..1.
        std: per channel, divides what is left.
        fixed_size: height and width in pixels that every image is scaled to, for towers that were trained on one size
            (CLIP, SigLIP); ``min_pixels`` and ``max_pixels`` are not used then. What is left at the right and lower
            edge beside whole patches is cut off, as by such a tower itself. See `PackedMedia.images`.
    """

    patch_size: int = 14
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    channels: int = 3
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    fixed_size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        counts = ("patch_size", "merge_size", "min_pixels", "max_pixels", "channels", "fixed_size")
        check_settings(self, least=dict.fromkeys(counts, 1), above={"std": 0})
        if self.channels not in (1, 3):
            raise ValueError(f"ImageProcessor got channels={self.channels}; give 1 (grey) or 3 (colour).")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(
                f"ImageProcessor got {len(self.mean)} values in mean and {len(self.std)} in std "
                f"for channels={self.channels}; give one per channel."
            )
        if self.fixed_size is not None and min(self.fixed_size) < self._block:
            raise ValueError(
                f"ImageProcessor got fixed_size={self.fixed_size}; both sides must be at least patch_size * merge_size "
                f"= {self._block}."
            )
        if self.fixed_size is None and not self._block**2 <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"ImageProcessor got min_pixels={self.min_pixels} and max_pixels={self.max_pixels}; "
                f"(patch_size * merge_size) ** 2 = {self._block**2} <= min_pixels <= max_pixels must hold."
            )

    @property
    def fingerprint(self) -> str:
        """Changes whenever some image would become something else."""
        return fingerprint(asdict(self))

    @property
    def patch_dim(self) -> int:
        """Numbers in one patch: ``channels * patch_size ** 2``."""
        return self.channels * self.patch_size**2

    @property
    def _block(self) -> int:
        return self.patch_size * self.merge_size

    def size(self, height: int, width: int, *, alone: bool = True) -> tuple[int, int]:
        """Height and width in patches of an image of ``height x width`` pixels.

        Args:
            height: in pixels.
            width: in pixels.
            alone: its record has no other image, which some models look at more closely.

        Raises:
            ImageError: the image has no pixels or, where its aspect ratio is kept, is too long and thin.
        """
        if min(height, width) < 1:
            raise ImageError(f"it is {height} pixels high and {width} wide, so there is nothing to see")
        block, merge = self._block, self.merge_size
        if self.fixed_size is not None:
            high, wide = self.fixed_size
            return high // block * merge, wide // block * merge
        if max(height, width) > LARGEST_ASPECT * min(height, width):
            raise ImageError(
                f"it is {height} pixels high and {width} wide, "
                f"but one side may be at most {LARGEST_ASPECT} times the other"
            )
        high, wide = round(height / block), round(width / block)
        if high * wide * block**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            high, wide = (max(1, math.floor(side / shrink / block)) for side in (height, width))
        elif high * wide * block**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            high, wide = (math.ceil(side * grow / block) for side in (height, width))
        return high * merge, wide * merge

    def rows_of_features(self, grid: tuple[int, int], size: tuple[int, int]) -> int:
        """Rows of features, that is backbone tokens, of an image.

        Args:
            grid: its height and width in patches.
            size: its height and width in pixels as it was in the data.
        """
        return math.prod(grid) // self.merge_size**2

    def tiles_in(self, grid: tuple[int, int], size: tuple[int, int]) -> int:
        """Tiles into which an image is cut, all of one size; 1 where it is not cut.

        Args:
            grid: its height and width in patches.
            size: its height and width in pixels as it was in the data.
        """
        del grid, size
        return 1

    def load(
        self, file: MediaFile, augment: Callable[[Image], Image] | None = None, *, alone: bool = True
    ) -> tuple[NDArray[np.float32], tuple[int, int]]:
        """The image's patches, normalised, and its height and width in patches; see `load_pixels`.

        Returns:
            ``[patches, patch_dim]`` floats in the encoder's order, and ``(height, width)`` in patches.
        """
        image = self.load_pixels(file, augment, alone=alone)
        return image.patches, image.grid

    def load_pixels(
        self, file: MediaFile, augment: Callable[[Image], Image] | None = None, *, alone: bool = True
    ) -> LoadedMedia:
        """The image's patches, in the encoder's order, before they are normalised where that can wait.

        Args:
            file: the image.
            augment: changes the image before it is scaled. What it returns is scaled to the size that the original
                has by the size rule, so it may crop but never changes how many tokens a sample has.
            alone: its record has no other image.

        Raises:
            ImageError: it cannot be decoded.
        """
        image = decode(file)
        size = image.height, image.width
        grid = self.size(*size, alone=alone)
        if augment is not None:
            image = augment(image)
        image = flatten(image, "RGB" if self.channels == 3 else "L")
        pixels = self.cut(self.values(image, grid, size), grid)
        normalisation = self.normalisation if pixels.dtype == np.uint8 else None
        tiles = Tiles(number) if (number := self.tiles_in(grid, size)) > 1 else None
        return LoadedMedia(pixels, grid, self.rows_of_features(grid, size), normalisation, size, tiles=tiles)

    @cached_property
    def normalisation(self) -> NDArray[np.float32]:
        """``[3, patch_dim]`` divisor, mean and deviation of each number of a patch of uint8."""
        of_channels = np.array([[255.0] * self.channels, self.mean, self.std], dtype=np.float32)
        return np.repeat(of_channels, self.patch_size**2, axis=1)

    def values(self, image: Image, grid: tuple[int, int], size: tuple[int, int]) -> NDArray[Any]:
        """Make an image's pixels for the encoder.

        Args:
            image: upright, in colour or grey as ``channels`` says, of any size.
            grid: the height and width in patches that it gets.
            size: the height and width in pixels that it had before it was augmented.

        Returns:
            ``[height, width, channels]`` uint8, which are normalised where the encoder computes; or normalised floats.
        """
        from PIL.Image import Resampling  # there is an image, so Pillow is there

        height, width = grid[0] * self.patch_size, grid[1] * self.patch_size
        scaled = self.fixed_size or (height, width)
        image = image.resize((scaled[1], scaled[0]), Resampling.BICUBIC)
        return np.asarray(image)[:height, :width].reshape(height, width, self.channels)

    def cut(self, values: NDArray[Any], grid: tuple[int, int]) -> NDArray[Any]:
        """``[height, width, channels]`` values -> ``[patches, patch_dim]`` in the encoder's order."""
        return cut_patches(values, grid, self.merge_size)


def cut_patches(values: NDArray[Any], grid: tuple[int, int], merge_size: int) -> NDArray[Any]:
    """Pixels as patches, in blocks that become one row of features each.

    Args:
        values: ``[height, width, channels]``.
        grid: height and width in patches.
        merge_size: side of a block in patches.

    Returns:
        ``[patches, channels * patch_size ** 2]``, the blocks from left to right and downward; see `ImageProcessor`.
    """
    height, width, channels = values.shape
    high, wide = height // grid[0], width // grid[1]
    blocks = values.reshape(grid[0] // merge_size, merge_size, high, grid[1] // merge_size, merge_size, wide, channels)
    # -> block down, block across, patch down, patch across, channel, pixel down, pixel across
    ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(ordered).reshape(-1, channels * high * wide)
