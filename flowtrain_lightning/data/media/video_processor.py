"""Videos: which frames are taken, how large they become, and their pixels as patches."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from flowtrain_lightning.data.batch import Clip
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.media.image_processor import LARGEST_ASPECT, cut_patches
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from flowtrain_lightning.data.media.media_files import VideoFile
from flowtrain_lightning.data.media.video_files import VideoError, VideoHeader, decode_frames, read_video_header
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.packing.setting_values import check_settings

_FEWEST_PIXELS_MORE = 1.05
"""A frame's share of all pixels is never below this many times ``min_pixels``, by Qwen's rule."""


class SampledVideo(NamedTuple):
    """The frames that are taken of a video.

    Attributes:
        frames: ``[frames]`` which frames, from 0, ascending.
        clip: the moments that they make.
        grid: height and width of a frame in patches.
        times: ``[moments]`` the middle of each moment, in seconds from the beginning.
    """

    frames: IntArray
    clip: Clip
    grid: tuple[int, int]
    times: tuple[float, ...]

    @property
    def patches(self) -> int:
        """Patches that the encoder reads."""
        return self.clip.moments * math.prod(self.grid)


@dataclass(frozen=True)
class VideoProcessor:
    """The rule of Qwen2-VL and Qwen2.5-VL for videos, and the pixels that follow from it.

    As many frames are taken as make ``fps`` a second, evenly from the whole video; ``temporal_patch_size`` of them make
    a moment. All frames keep their aspect ratio and get one size, whose sides are multiples of
    ``patch_size * merge_size``. Equal to the bit with the video processor of ``transformers`` for the same frames.

    Attributes:
        patch_size: side of a patch in pixels.
        merge_size: side of a block of patches that becomes one row of features.
        temporal_patch_size: frames that the encoder takes together.
        fps: frames a second that are taken.
        min_frames: at least so many are taken, where the video has them.
        max_frames: at most so many are taken; longer videos are looked at less often.
        min_pixels: smaller frames are scaled up to about this many pixels.
        max_pixels: larger frames are scaled down to at most this many pixels.
        total_pixels: that all moments share, of which each counts like one frame; None: there is no such limit.
        mean: per channel, subtracted from values in 0..1.
        std: per channel, divides what is left.
    """

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    total_pixels: int | None = None
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        counts = ("patch_size", "merge_size", "temporal_patch_size", "min_frames", "max_frames", "min_pixels")
        least = dict.fromkeys((*counts, "max_pixels", "total_pixels"), 1)
        check_settings(self, least=least, above={"fps": 0, "std": 0})
        if not self.temporal_patch_size <= self.min_frames <= self.max_frames:
            raise ValueError(
                f"{type(self).__name__} got min_frames={self.min_frames} and max_frames={self.max_frames}; "
                f"temporal_patch_size = {self.temporal_patch_size} <= min_frames <= max_frames must hold."
            )
        if not 0 < self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"{type(self).__name__} got min_pixels={self.min_pixels} and max_pixels={self.max_pixels}; "
                "0 < min_pixels <= max_pixels must hold."
            )

    @property
    def fingerprint(self) -> str:
        """Changes whenever some video would become something else."""
        return fingerprint([type(self).__name__, asdict(self)])

    @cached_property
    def normalisation(self) -> NDArray[np.float32]:
        """``[3, patch_dim]`` divisor, mean and deviation of each number of a patch of uint8.

        The divisor is in mean and deviation already, as in ``transformers``: it rounds otherwise than images do.
        """
        scaled = (np.asarray(given, np.float32) * np.float32(255) for given in (self.mean, self.std))
        return np.repeat(np.stack([np.ones(3, np.float32), *scaled]), self.patch_size**2, axis=1)

    def sample(self, header: VideoHeader) -> SampledVideo:
        """Choose the frames that are taken of a video.

        Raises:
            VideoError: it is shorter than one moment, or too long and thin.
        """
        together = self.temporal_patch_size
        if header.frames < together:
            raise VideoError(f"it has {header.frames} frames, but the encoder takes {together} together")
        frames = self.choose(header.frames, header.rate)
        padded = np.concatenate([frames, np.repeat(frames[-1:], -len(frames) % together)])
        ends = padded.reshape(-1, together)[:, [0, -1]] / header.rate
        grid = self.size(len(frames), header.height, header.width)
        sampled_rate = len(frames) / header.frames * header.rate
        clip = Clip(len(padded) // together, together, together / sampled_rate)
        return SampledVideo(frames, clip, grid, tuple((ends.sum(axis=1) / 2).tolist()))

    def choose(self, frames: int, rate: float) -> IntArray:
        """``[frames taken]``, ascending: which of so many frames, of which ``rate`` are shown a second, are taken."""
        together = self.temporal_patch_size
        most = min(self.max_frames, frames) // together * together
        count = int(min(max(frames / rate * self.fps, self.min_frames), most)) // together * together
        # Counted in float32, which decides where two frames are equally near.
        numbers = torch.arange(0, frames, frames / count, dtype=torch.float32).int().numpy().astype(np.int64)
        return numbers[:count]

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width in patches of each of so many frames of ``height x width`` pixels.

        Raises:
            VideoError: they are too long and thin.
        """
        most = self.max_pixels
        if self.total_pixels is not None:
            most = self.floored(min(most, self.total_pixels * self.temporal_patch_size // frames))
        return self.scaled(1, height, width, most)

    def floored(self, share: int) -> int:
        """The pixels that a frame may have at most, where its share of those of all is less than the rule allows."""
        return max(share, int(self.min_pixels * _FEWEST_PIXELS_MORE))

    def scaled(self, frames: float, height: int, width: int, most: int, counted: int = 1) -> tuple[int, int]:
        """Height and width in patches that are nearest to the aspect ratio within the limits.

        Args:
            frames: whose pixels count together.
            height: of a frame in pixels.
            width: of a frame in pixels.
            most: pixels that all may have.
            counted: frames, rounded as the rule does it where it compares with the limits.

        Raises:
            VideoError: one side is too many times the other.
        """
        if max(height, width) > LARGEST_ASPECT * min(height, width):
            raise VideoError(
                f"it is {height} pixels high and {width} wide, "
                f"but one side may be at most {LARGEST_ASPECT} times the other"
            )
        block, merge = self.patch_size * self.merge_size, self.merge_size
        high, wide = round(height / block), round(width / block)
        if counted * high * wide * block**2 > most:
            shrink = math.sqrt(frames * height * width / most)
            high, wide = (max(1, math.floor(side / shrink / block)) for side in (height, width))
        elif counted * high * wide * block**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            high, wide = (math.ceil(side * grow / block) for side in (height, width))
        return high * merge, wide * merge

    def rows_of_features(self, sampled: SampledVideo) -> int:
        """Rows of features, that is backbone tokens, of a video."""
        return sampled.patches // self.merge_size**2

    def load(self, video: VideoFile, moments: tuple[int, int] | None = None) -> LoadedMedia:
        """The video's patches in the encoder's order: moment by moment, and of each patch frame by frame.

        Args:
            video: the video.
            moments: from which to before which; None: all. Nothing behind them is decoded.

        Raises:
            VideoError: it cannot be decoded.
        """
        header = read_video_header(video)
        sampled, together = self.sample(header), self.temporal_patch_size
        begin, end = moments or (0, sampled.clip.moments)
        numbers = sampled.frames[begin * together : end * together]
        frames = [self._patches(frame, sampled.grid) for frame in decode_frames(video, numbers)]
        frames += frames[-1:] * (-len(frames) % together)
        patches = np.stack(frames).reshape(end - begin, together, -1, frames[0].shape[-1]).swapaxes(1, 2)
        return LoadedMedia(
            patches.reshape(-1, frames[0].shape[-1]),
            sampled.grid,
            self.rows_of_features(sampled) * (end - begin) // sampled.clip.moments,
            self.normalisation,
            (header.height, header.width),
            sampled.clip.between(begin, end),
        )

    def _patches(self, frame: NDArray[np.uint8], grid: tuple[int, int]) -> NDArray[np.uint8]:
        """``[patches, patch_dim]`` of one frame, scaled as ``torchvision`` scales bytes: by PyTorch itself."""
        size = grid[0] * self.patch_size, grid[1] * self.patch_size
        pixels = torch.from_numpy(np.ascontiguousarray(frame.transpose(2, 0, 1)))[None]
        if pixels.shape[2:] != size:
            pixels = functional.interpolate(pixels, size, mode="bicubic", align_corners=False, antialias=True)
        return cut_patches(pixels[0].permute(1, 2, 0).numpy(), grid, self.merge_size)
