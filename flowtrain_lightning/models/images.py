"""How a pretrained model wants its images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from flowtrain_lightning.data import ImageProcessor


def images_of(model: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> ImageProcessor:
    """What a Hugging Face model's own image processor does to images, for ``FlowDataModule(images=...)``.

    Patches equal those of Qwen's image processor. Towers that want images of one size (CLIP, SigLIP) get whole images
    scaled to that size, where CLIP's processor cuts the margins off images that are not square.

    Args:
        model: the model's name or folder.
        min_pixels: in place of the model's own, see `ImageProcessor`.
        max_pixels: in place of the model's own, see `ImageProcessor`.

    Raises:
        ValueError: its image processor is of another kind, or computes pixels in another way.
    """
    from transformers import AutoConfig, AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(model)
    settings: dict[str, Any] = {"mean": tuple(processor.image_mean), "std": tuple(processor.image_std)}
    match type(processor).__name__.removesuffix("Pil"):
        case "Qwen2VLImageProcessor":
            settings |= {"patch_size": processor.patch_size, "merge_size": processor.merge_size}
            settings |= {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
        case "CLIPImageProcessor" | "LlavaImageProcessor" | "SiglipImageProcessor":
            tower = AutoConfig.from_pretrained(model).vision_config
            size = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
            settings |= {"patch_size": tower.patch_size, "merge_size": 1, "fixed_size": (size["height"], size["width"])}
        case kind:
            raise ValueError(
                f"The image processor of {model} is a {kind}, but only those of Qwen, CLIP, LLaVA and SigLIP can be "
                "followed. Say what it does yourself: FlowDataModule(images=ImageProcessor(...))."
            )
    _check_pixels(processor, model)
    bounds = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    return ImageProcessor(**settings | {name: pixels for name, pixels in bounds.items() if pixels is not None})


def _check_pixels(processor: Any, model: str | Path) -> None:
    """Refuses what `ImageProcessor` does not do: it scales by bicubic filtering, divides by 255 and normalizes."""
    usual = {"resample": 3, "rescale_factor": 1 / 255, "do_rescale": True, "do_normalize": True}
    unusual = [name for name, value in usual.items() if not math.isclose(getattr(processor, name), value)]
    if unusual:
        said = ", ".join(f"{name}={getattr(processor, name)!r}" for name in unusual)
        wanted = ", ".join(f"{name}={usual[name]!r}" for name in unusual)
        raise ValueError(
            f"The image processor of {model} has {said}, which cannot be followed (only {wanted}). Say what images "
            "become yourself, as near as it comes: FlowDataModule(images=ImageProcessor(...))."
        )
