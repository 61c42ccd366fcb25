"""How a pretrained model wants its videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowtrain_lightning.data import VideoProcessor
from flowtrain_lightning.models.qwen3_videos import Qwen3Videos

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
"""What `VideoProcessor` does."""


def videos_of(model: str | Path) -> VideoProcessor | None:
    """What a Hugging Face model's own video processor does, for ``FlowDataModule(videos=...)``.

    Equal to the bit with it for the same frames. ``dataclasses.replace`` changes how many frames or pixels are taken.

    Args:
        model: the model's name or folder.

    Returns:
        None where its family takes no videos.

    Raises:
        ValueError: its files ask for something else than what is done here.
    """
    from transformers import AutoConfig
    from transformers.video_processing_utils import VideoProcessorMixin  # those of the families need torchvision

    family = AutoConfig.from_pretrained(model).model_type
    if family not in (*_QWEN2, *_QWEN3):
        return None
    settings, _ = VideoProcessorMixin.get_video_processor_dict(model)
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
