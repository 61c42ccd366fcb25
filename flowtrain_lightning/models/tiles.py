"""Images that were cut into tiles of one size, as the encoders that take tiles want them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flowtrain_lightning.data import PackedMedia


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
