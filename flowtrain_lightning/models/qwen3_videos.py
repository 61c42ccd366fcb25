"""Qwen3-VL's videos: the pixels of all frames count together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data import VideoProcessor


@dataclass(frozen=True)
class Qwen3Videos(VideoProcessor):
    """The rule of Qwen3-VL for videos. ``min_pixels`` and ``max_pixels`` are those of all frames together.

    Attributes:
        frame_pixels: of a frame, at most; None: there is no such limit.
    """

    patch_size: int = 16
    min_pixels: int = 128 * 32 * 32
    max_pixels: int = 768 * 32 * 32
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    frame_pixels: int | None = None

    def choose(self, frames: int, rate: float) -> NDArray[np.int64]:
        """Which of so many frames, of which ``rate`` are shown a second, are taken, with the first and the last."""
        count = min(max(int(frames / rate * self.fps), self.min_frames), self.max_frames, frames)
        return np.linspace(0, frames - 1, count).round().astype(np.int64)

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width in patches of each of so many frames of ``height x width`` pixels.

        Raises:
            VideoError: they are too long and thin.
        """
        most, block = self.max_pixels, self.patch_size * self.merge_size
        if self.frame_pixels is not None:
            most = frames * self.floored(min(self.frame_pixels, self.max_pixels // frames))
        if min(height, width) < block:
            grow = max(block / height, block / width)
            height, width = int(height * grow), int(width * grow)
        counted = round(frames / self.temporal_patch_size) * self.temporal_patch_size
        return self.scaled(frames, height, width, most, counted)
