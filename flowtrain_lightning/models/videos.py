"""Video processing of pretrained models, and Qwen3-VL's rule for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data import VideoProcessor
from flowtrain_lightning.models.published_config import read_config


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
        chosen: NDArray[np.int64] = np.linspace(0, frames - 1, count).round().astype(np.int64)
        return chosen

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


_QWEN2 = ("qwen2_vl", "qwen2_5_vl")
_QWEN3 = ("qwen3_vl", "qwen3_vl_moe")

_TOKENS_FOR_PIXELS = 0.9
"""The share of a sequence of Qwen2-VL's that its processor gives to a video, where it limits that."""

_USUAL = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "num_frames": None,
}
"""Do the same as `VideoProcessor`."""


def videos_of(model: str | Path) -> VideoProcessor | None:
    """Follows a Hugging Face model's own video processor, for ``FlowDataModule(videos=...)``.

    Equal to the bit with it for the same frames. ``dataclasses.replace`` changes how many frames or pixels are taken.

    Args:
        model: the model's name or folder.

    Returns:
        None where its family takes no videos, or its files do not say what becomes of them.

    Raises:
        ValueError: its files ask for something else than what is done here.
    """
    from transformers.video_processing_utils import VideoProcessorMixin  # those of the families need torchvision

    family = read_config(model).model_type
    if family not in (*_QWEN2, *_QWEN3):
        return None
    try:
        settings, _ = VideoProcessorMixin.get_video_processor_dict(model)
    except OSError:  # a folder of weights alone: who reads images by parts of their own needs no videos
        return None
    _check(settings, model)
    kind = VideoProcessor if family in _QWEN2 else Qwen3Videos
    names = ("patch_size", "merge_size", "temporal_patch_size", "fps", "min_frames", "max_frames")
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    given |= {name: tuple(settings[f"image_{name}"]) for name in ("mean", "std") if settings.get(f"image_{name}")}
    given |= _pixels(settings, legacy=family in _QWEN2)
    limit = settings.get("max_video_tokens")
    if settings.get("cap_pixels_per_frame"):
        block = (given.get("patch_size", kind.patch_size) * given.get("merge_size", kind.merge_size)) ** 2
        if family in _QWEN2:
            given["total_pixels"] = int((limit or 128_000) * block * _TOKENS_FOR_PIXELS)
        else:
            given["frame_pixels"] = (limit or 768) * block
    return kind(**given)


def _pixels(settings: dict[str, Any], *, legacy: bool) -> dict[str, int]:
    """The limits of ``size``, in whose place files of Qwen2-VL may have ``min_pixels`` and ``max_pixels``."""
    size = settings.get("size") or {}
    found = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    if legacy:
        found |= {name: settings[name] for name in found if settings.get(name) is not None}
    return {name: pixels for name, pixels in found.items() if pixels is not None}


def _check(settings: dict[str, Any], model: str | Path) -> None:
    unusual = [name for name, usual in _USUAL.items() if settings.get(name, usual) != usual]
    if unusual:
        said = ", ".join(f"{name}={settings[name]!r}" for name in unusual)
        wanted = ", ".join(f"{name}={_USUAL[name]!r}" for name in unusual)
        raise ValueError(
            f"The video processor of {model} has {said}, which cannot be followed (only {wanted}). Say what videos "
            "become yourself, as near as it comes: FlowDataModule(videos=VideoProcessor(...))."
        )
