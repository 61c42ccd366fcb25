"""Image processing of pretrained models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flowtrain_lightning.data import ImageProcessor
from flowtrain_lightning.models.huggingface_images import HuggingFaceImages, OnevisionImages
from flowtrain_lightning.models.published_config import read_config, without_foreign_code


def images_of(model: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> ImageProcessor:
    """Follows a Hugging Face model's own image processor, for ``FlowDataModule(images=...)``.

    Equal to the bit with its Pillow backend: Qwen's patches by our own code, whatever has tiles of one size (CLIP's and
    SigLIP's towers, LLaVA-OneVision, InternVL, SmolVLM, Gemma 3) by the processor itself.

    Args:
        model: the model's name or folder.
        min_pixels: of an image, in place of the model's own; for Qwen alone.
        max_pixels: of an image, in place of the model's own; for Qwen alone.

    Raises:
        ValueError: its image processor is of another kind, or computes pixels in another way.
    """
    from transformers import AutoImageProcessor

    with without_foreign_code(model):
        processor = AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=False)
    config = read_config(model)
    bounds = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    given = {name: pixels for name, pixels in bounds.items() if pixels is not None}
    kind = type(processor).__name__.removesuffix("Pil").removesuffix("ImageProcessor")
    if kind == "Qwen2VL":
        return _patches(processor, given, model)
    if given:
        raise ValueError(
            f"The images of {model} have one size, so that {' and '.join(given)} mean nothing; leave them out."
        )
    return _tiles(kind, processor, config, model)


def _patches(processor: Any, bounds: dict[str, int], model: str | Path) -> ImageProcessor:
    """Qwen's, of any size."""
    _check_pixels(processor, model)
    return ImageProcessor(
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
        min_pixels=bounds.get("min_pixels", processor.size["shortest_edge"]),
        max_pixels=bounds.get("max_pixels", processor.size["longest_edge"]),
        mean=tuple(processor.image_mean),
        std=tuple(processor.image_std),
    )


def _tiles(kind: str, processor: Any, config: Any, model: str | Path) -> ImageProcessor:
    """Those of one size, or cut into tiles of one size."""
    patch = config.vision_config.patch_size
    patch_size = patch[0] if isinstance(patch, list | tuple) else patch
    options: dict[str, Any] = {}
    merge, size = 1, processor.size
    maker: Callable[..., HuggingFaceImages] = HuggingFaceImages
    match kind:
        case "CLIP":
            size = processor.crop_size if processor.do_center_crop else size
        case "Llava" | "Siglip":
            size = processor.crop_size if getattr(processor, "do_center_crop", False) else size
        case "LlavaOnevision":
            maker = partial(OnevisionImages, most_tiles=int(config.vision_aspect_ratio.removeprefix("anyres_max_")))
        case "GotOcr2":
            merge, options = round(1 / config.downsample_ratio), {"crop_to_patches": True}
        case "Gemma3":
            merge = size["height"] // patch_size // math.isqrt(config.mm_tokens_per_image)
            options = {"do_pan_and_scan": False}
        case "SmolVLM" | "Idefics3" if hasattr(config, "scale_factor"):
            side = processor.max_image_size["longest_edge"]
            merge, size = config.scale_factor, {"height": side, "width": side}
        case _:
            raise ValueError(
                f"The image processor of {model} is a {kind}ImageProcessor, but only those of Qwen-VL, CLIP, "
                "LLaVA-1.5, SigLIP, LLaVA-OneVision, InternVL, SmolVLM and Gemma 3 can be followed. Say what it does "
                "yourself: FlowDataModule(images=ImageProcessor(...))."
            )
    return maker(
        patch_size=patch_size,
        merge_size=merge,
        fixed_size=(size["height"], size["width"]),
        settings=json.loads(processor.to_json_string()),
        processor=processor,
        options=options,
    )


def _check_pixels(processor: Any, model: str | Path) -> None:
    """Refuses what `ImageProcessor` does not do: it scales by bicubic filtering, divides by 255 and normalizes."""
    usual = {"do_resize": True, "resample": 3, "rescale_factor": 1 / 255, "do_rescale": True, "do_normalize": True}
    unusual = [name for name, value in usual.items() if not math.isclose(getattr(processor, name), value)]
    if unusual:
        said = ", ".join(f"{name}={getattr(processor, name)!r}" for name in unusual)
        wanted = ", ".join(f"{name}={usual[name]!r}" for name in unusual)
        raise ValueError(
            f"The image processor of {model} has {said}, which cannot be followed (only {wanted}). Say what images "
            "become yourself, as near as it comes: FlowDataModule(images=ImageProcessor(...))."
        )
