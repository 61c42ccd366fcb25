"""A media item ready to be packed: its pixels as patches, and how many rows of features become of it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.batch import Clip, Tiles
from flowtrain_lightning.packing import IMAGE


class LoadedMedia(NamedTuple):
    """A media item ready to be packed.

    Attributes:
        pixels: ``[patches, patch_dim]`` uint8, or normalised floats; of a video or audio, see `PackedMedia`.
        grid: its height and width in patches; of audio 1, and its frames.
        rows: rows of features that the encoder returns for it.
        normalisation: of pixels of uint8, see `ImageProcessor`.
        size: its height and width in pixels as it was in the data; of audio its samples, and how many a second.
        clip: what a video is in time; None of an image.
        modality: which encoder takes it.
        tiles: into which a picture is cut, one below the other; None of others.
    """

    pixels: NDArray[Any]
    grid: tuple[int, int]
    rows: int
    normalisation: NDArray[np.float32] | None = None
    size: tuple[int, int] = (0, 0)
    clip: Clip | None = None
    modality: str = IMAGE
    tiles: Tiles | None = None

    @property
    def parts(self) -> int:
        """Moments of a clip, tiles of a picture; 1 where it is in one part."""
        return self.clip.moments if self.clip is not None else 1 if self.tiles is None else self.tiles.number

    def between(self, begin: int, end: int) -> LoadedMedia:
        """Some of its parts, from ``begin`` to before ``end``."""
        if (begin, end) == (0, self.parts):
            return self
        pixels, rows = len(self.pixels) // self.parts, self.rows // self.parts
        own = self._replace(pixels=self.pixels[begin * pixels : end * pixels], rows=(end - begin) * rows)
        if self.clip is not None:
            return own._replace(clip=self.clip.between(begin, end))
        assert self.tiles is not None, "an item of several parts is a clip or has tiles"
        high = self.grid[0] // self.parts * (end - begin)
        return own._replace(grid=(high, self.grid[1]), tiles=self.tiles.between(begin, end))

    @property
    def patches(self) -> NDArray[np.float32]:
        """``[patches, patch_dim]`` floats."""
        return self.pixels if self.normalisation is None else normalised(self.pixels, self.normalisation)


@runtime_checkable
class OwnMedia(Protocol):
    """A media item of a `SampleSource` of one's own, which knows how it is read. ``str`` names it in messages."""

    def load(self) -> LoadedMedia:
        """Loads the item.

        Raises:
            MediaError: it cannot be read; says why.
        """
        ...


def normalised(pixels: NDArray[Any], normalisation: NDArray[np.float32]) -> NDArray[np.float32]:
    """``[patches, patch_dim]`` pixels as the encoder sees them; see `ImageProcessor.normalisation`."""
    if pixels.dtype != np.uint8:
        return pixels
    divisor, mean, deviation = normalisation
    normal: NDArray[np.float32] = (pixels.astype(np.float32) / divisor - mean) / deviation
    return normal
