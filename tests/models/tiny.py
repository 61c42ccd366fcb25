"""Models of Hugging Face's families, so small that a step takes milliseconds, and images as they want them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

import flowtrain_lightning as flow
from flowtrain_lightning.data import ImageProcessor
from flowtrain_lightning.models import HuggingFaceImages
from flowtrain_lightning.models.huggingface_images import OnevisionImages
from tests.tiny import IMAGES, CharTokenizer

_IMAGE = CharTokenizer.specials.index("<|image_pad|>")
_VISION_START, _VISION_END = (CharTokenizer.specials.index(f"<|vision_{end}|>") for end in ("start", "end"))
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": CharTokenizer.vocabulary,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_PATCHES = {"patch_size": IMAGES.patch_size, "spatial_merge_size": IMAGES.merge_size}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, **_PATCHES}
_TOKENS = {"image_token_id": _IMAGE, "vision_start_token_id": _VISION_START, "vision_end_token_id": _VISION_END}
_QWEN = {"text_config": {**_TEXT, **_ROTARY}, **_TOKENS}
_SQUARE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_LLAMA = {**_TEXT, "model_type": "llama", "head_dim": 8, "pad_token_id": 0}

_PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32]]

SQUARE = ImageProcessor(patch_size=4, merge_size=1, fixed_size=(16, 16))


def _internvl_images() -> HuggingFaceImages:
    """Up to four tiles and one of the whole image, each of 16 x 16 pixels."""
    processor = transformers.GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    options = {"crop_to_patches": True}
    return HuggingFaceImages(patch_size=4, merge_size=2, fixed_size=(16, 16), processor=processor, options=options)


def _onevision_images() -> OnevisionImages:
    """Up to four tiles and one of the whole image, each of 16 x 16 pixels; as many rows of features as two have."""
    processor = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 16, "width": 16}, image_grid_pinpoints=_PINPOINTS
    )
    return OnevisionImages(patch_size=4, merge_size=1, fixed_size=(16, 16), processor=processor, most_tiles=2)


def _smolvlm_images() -> HuggingFaceImages:
    """Up to four tiles and one of the whole image, each of 16 x 16 pixels."""
    processor = SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return HuggingFaceImages(patch_size=4, merge_size=2, fixed_size=(16, 16), processor=processor)


@dataclass(frozen=True)
class Family:
    """A module's class, the config of a model for it, how its images are made, and its attention in transformers."""

    kind: type[flow.models.HuggingFaceVLM]
    config: dict[str, Any]
    images: ImageProcessor = field(default=IMAGES)
    attention: str = "sdpa"


FAMILIES = {
    "qwen2_vl": Family(
        flow.models.QwenVLM,
        {
            "model_type": "qwen2_vl",
            **_QWEN,
            "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, **_PATCHES},
        },
    ),
    "qwen2_5_vl": Family(
        flow.models.QwenVLM,
        {
            "model_type": "qwen2_5_vl",
            **_QWEN,
            "vision_config": {"depth": 2, **_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        },
    ),
    "qwen3_vl": Family(
        flow.models.QwenVLM,
        {
            "model_type": "qwen3_vl",
            **_QWEN,
            "text_config": {**_TEXT, **_ROTARY, "head_dim": 8},
            "vision_config": {
                "depth": 3,
                **_TOWER,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
        },
    ),
    "llava with clip": Family(
        flow.models.LlavaVLM,
        {
            "model_type": "llava",
            "text_config": _LLAMA,
            "vision_config": {**_SQUARE, "model_type": "clip_vision_model"},
            "image_token_id": _IMAGE,
        },
        SQUARE,
    ),
    "llava with siglip": Family(
        flow.models.LlavaVLM,
        {
            "model_type": "llava",
            "text_config": _LLAMA,
            "vision_config": {**_SQUARE, "model_type": "siglip_vision_model", "vision_use_head": False},
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "image_token_id": _IMAGE,
        },
        SQUARE,
    ),
}
FAMILIES["qwen3_vl_moe"] = Family(
    flow.models.QwenVLM,
    {
        **FAMILIES["qwen3_vl"].config,
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **FAMILIES["qwen3_vl"].config["text_config"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    },
)
FAMILIES["internvl"] = Family(
    flow.models.InternVLM,
    {
        "model_type": "internvl",
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_SQUARE, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": _IMAGE,
        "image_seq_length": 4,
    },
    _internvl_images(),
)
FAMILIES["llava_onevision"] = Family(
    flow.models.OnevisionVLM,
    {
        "model_type": "llava_onevision",
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_SQUARE, "model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": _IMAGE,
        "image_grid_pinpoints": _PINPOINTS,
        "vision_aspect_ratio": "anyres_max_2",
    },
    _onevision_images(),
)
FAMILIES["smolvlm"] = Family(
    flow.models.SmolVLM,
    {
        "model_type": "smolvlm",
        "text_config": _LLAMA,
        "vision_config": {**_SQUARE, "model_type": "smolvlm_vision"},
        "image_token_id": _IMAGE,
        "scale_factor": 2,
        "tie_word_embeddings": False,
    },
    _smolvlm_images(),
)
_LOCAL_AND_GLOBAL = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
_SIGLIP = {**_SQUARE, "model_type": "siglip_vision_model", "vision_use_head": False}
FAMILIES["gemma3"] = Family(
    flow.models.GemmaVLM,
    {
        "model_type": "gemma3",
        "text_config": {**_TEXT, **_LOCAL_AND_GLOBAL, "pad_token_id": 0, "query_pre_attn_scalar": 16},
        "vision_config": _SIGLIP,
        "image_token_id": _IMAGE,
        "mm_tokens_per_image": 4,
    },
    ImageProcessor(patch_size=4, merge_size=2, fixed_size=(16, 16)),
)
FAMILIES["paligemma 2"] = Family(
    flow.models.PaliGemmaVLM,
    {
        "model_type": "paligemma",
        "text_config": {**_TEXT, **_LOCAL_AND_GLOBAL, "model_type": "gemma2", "pad_token_id": 0},
        "vision_config": _SIGLIP,
        "projection_dim": 32,
        "hidden_size": 32,
        "image_token_index": _IMAGE,
    },
    SQUARE,
    attention="eager",
)
FAMILIES["qwen2_vl, tied"] = Family(flow.models.QwenVLM, {**FAMILIES["qwen2_vl"].config, "tie_word_embeddings": True})
_TOWERS = {
    "smolvlm": ["model.vision_model"],
    "qwen2_vl": ["model.visual.blocks", "model.visual.patch_embed"],
    "qwen2_5_vl": ["model.visual.blocks", "model.visual.patch_embed"],
    "qwen3_vl": ["model.visual.blocks", "model.visual.patch_embed", "model.visual.pos_embed"],
    "qwen3_vl_moe": ["model.visual.blocks", "model.visual.patch_embed", "model.visual.pos_embed"],
}
_PROJECTORS = {
    "smolvlm": ["model.connector.modality_projection"],
    "qwen2_vl": ["model.visual.merger"],
    "qwen2_5_vl": ["model.visual.merger"],
    "qwen3_vl": ["model.visual.merger", "model.visual.deepstack_merger_list"],
    "qwen3_vl_moe": ["model.visual.merger", "model.visual.deepstack_merger_list"],
}


def tower_of(family: str) -> list[str]:
    """The modules of a family's tower, as a user freezes them."""
    return _TOWERS.get(family.partition(",")[0], ["model.vision_tower"])


def projector_of(family: str) -> list[str]:
    """The modules that are left of its encoder half."""
    return _PROJECTORS.get(family.partition(",")[0], ["model.multi_modal_projector"])
