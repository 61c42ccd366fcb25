"""Hugging Face's processors with the sizes of images, tiles and patches that each family is published with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.models.processors import PUBLISHED, Published, gemma_tokenizer

_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _qwen(family: str, **settings: Any) -> Published:
    return replace(PUBLISHED[family], image_processor=lambda: transformers.Qwen2VLImageProcessorPil(**settings))


def _llava() -> Published:
    tower = {"image_size": 336, "patch_size": 14}
    return replace(
        PUBLISHED["llava"],
        config=lambda: transformers.LlavaConfig(vision_config=transformers.CLIPVisionConfig(**tower)),
        image_processor=lambda: transformers.CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=_square(336)),
    )


def _onevision() -> Published:
    return replace(
        PUBLISHED["llava_onevision"],
        image_processor=lambda: transformers.LlavaOnevisionImageProcessorPil(**_HALF),
        settings={"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
    )


def _internvl() -> Published:
    tower = {"image_size": [448, 448], "patch_size": [14, 14]}
    return replace(
        PUBLISHED["internvl"],
        config=lambda: transformers.InternVLConfig(vision_config=tower),
        image_processor=lambda: transformers.GotOcr2ImageProcessorPil(size=_square(448), **_IMAGENET),
        settings={"image_seq_length": 256},
    )


def _smolvlm() -> Published:
    sizes = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    return replace(
        PUBLISHED["smolvlm"],
        config=lambda: transformers.SmolVLMConfig(scale_factor=4, vision_config={"patch_size": 16}),
        image_processor=lambda: SmolVLMImageProcessorPil(**sizes),
        settings={"image_seq_len": 64},
    )


def _gemma3() -> Published:
    tower = {"image_size": 896, "patch_size": 14}
    return replace(
        PUBLISHED["gemma3"],
        config=lambda: transformers.Gemma3Config(mm_tokens_per_image=256, vision_config=tower),
        image_processor=lambda: transformers.Gemma3ImageProcessorPil(size=_square(896)),
        settings={"image_seq_length": 256},
    )


def _paligemma_images() -> Any:
    processor = transformers.SiglipImageProcessorPil(size=_square(224))
    processor.image_seq_length = 256
    return processor


def _paligemma() -> Published:
    tower = {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 14}
    return Published(
        lambda: transformers.PaliGemmaConfig(vision_config=tower),
        lambda: gemma_tokenizer("<image>"),
        _paligemma_images,
        "PaliGemmaProcessor",
        "gemma3.jinja",  # it is published without one
    )


IN_PUBLISHED_SIZE = {
    "qwen2_vl": _qwen("qwen2_vl", min_pixels=3136, max_pixels=12845056),
    "qwen2_5_vl": _qwen("qwen2_5_vl", min_pixels=3136, max_pixels=12845056),
    "qwen3_vl": _qwen("qwen3_vl", patch_size=16, min_pixels=65536, max_pixels=16777216, **_HALF),
    "llava": _llava(),
    "llava_onevision": _onevision(),
    "internvl": _internvl(),
    "smolvlm": _smolvlm(),
    "gemma3": _gemma3(),
    "paligemma": _paligemma(),
}
"""By ``model_type``, as ``preprocessor_config.json`` and ``config.json`` have it of Qwen2-VL, Qwen2.5-VL, Qwen3-VL,
LLaVA-1.5, LLaVA-OneVision, InternVL3, SmolVLM2-500M, Gemma 3 and PaliGemma 2 (224) in the form of ``transformers``."""
