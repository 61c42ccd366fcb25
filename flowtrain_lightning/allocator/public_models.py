"""Public models by name: the dimensions in their published ``config.json``, and nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from flowtrain_lightning.allocator.description import ModuleDescription
from flowtrain_lightning.allocator.hf_config import describe_config
from flowtrain_lightning.allocator.role_layout import PlanningError


def _text(
    kind: str,
    layers: int,
    hidden: int,
    feed_forward: int,
    heads: int,
    key_value_heads: int,
    vocabulary: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": vocabulary,
        **more,
    }


def _tower(
    kind: str, layers: int, hidden: int, feed_forward: int, heads: int, image: int, patch: int
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "image_size": image,
        "patch_size": patch,
    }


def _qwen2_vl(output: int) -> dict[str, Any]:
    return {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14, "hidden_size": output}


def _qwen2_5_vl(output: int, feed_forward: int) -> dict[str, Any]:
    return {"hidden_size": 1280, "intermediate_size": feed_forward, "out_hidden_size": output}


def _omni(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """The thinker, which hears and sees; the talker is not of it."""
    audio = {"output_dim": text["hidden_size"]}
    return {"model_type": "qwen2_5_omni_thinker", "text_config": text, "vision_config": vision, "audio_config": audio}


def _qwen3_vl(layers: int, hidden: int, feed_forward: int, output: int, levels: list[int]) -> dict[str, Any]:
    return {
        "depth": layers,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "out_hidden_size": output,
        "num_heads": 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": levels,
    }


def _config(kind: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "text_config": text, "vision_config": vision, **more}


_CLIP = _tower("clip_vision_model", 24, 1024, 4096, 16, 336, 14)
_SIGLIP = _tower("siglip_vision_model", 27, 1152, 4304, 16, 896, 14)
_SMALL_SIGLIP = _tower("smolvlm_vision", 27, 1152, 4304, 16, 384, 14)
_INTERN_300M = _tower("internvl_vision", 24, 1024, 4096, 16, 448, 14)
_INTERN_6B = _tower("internvl_vision", 45, 3200, 12800, 25, 448, 14)
_GEMMA_WINDOW = {"sliding_window": 1024, "sliding_window_pattern": 6}
_LLAVA = {"vision_feature_layer": -2}
_A3B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}

_SANA = {
    "num_layers": 20,
    "num_attention_heads": 70,
    "attention_head_dim": 32,
    "num_cross_attention_heads": 20,
    "mlp_ratio": 2.5,
    "in_channels": 32,
    "patch_size": 1,
}
"""Sana's transformer of 1.6 billion parameters (arXiv 2410.10629), which draws latents."""

# fmt: off
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    # backbone: layers, hidden, feed-forward, heads, key-value heads, vocabulary
    "qwen2-vl-2b": _config(
        "qwen2_vl", _text("qwen2", 28, 1536, 8960, 12, 2, 151936),
        _qwen2_vl(1536), tie_word_embeddings=True,
    ),
    "qwen2-vl-7b": _config(
        "qwen2_vl", _text("qwen2", 28, 3584, 18944, 28, 4, 152064),
        _qwen2_vl(3584),
    ),
    "qwen2-vl-72b": _config(
        "qwen2_vl", _text("qwen2", 80, 8192, 29568, 64, 8, 152064),
        _qwen2_vl(8192),
    ),
    "qwen2.5-vl-3b": _config(
        "qwen2_5_vl", _text("qwen2", 36, 2048, 11008, 16, 2, 151936),
        _qwen2_5_vl(2048, 3420), tie_word_embeddings=True,
    ),
    "qwen2.5-vl-7b": _config(
        "qwen2_5_vl", _text("qwen2", 28, 3584, 18944, 28, 4, 152064),
        _qwen2_5_vl(3584, 3420),
    ),
    "qwen2.5-vl-32b": _config(
        "qwen2_5_vl", _text("qwen2", 64, 5120, 27648, 40, 8, 152064),
        _qwen2_5_vl(5120, 3456),
    ),
    "qwen2.5-vl-72b": _config(
        "qwen2_5_vl", _text("qwen2", 80, 8192, 29568, 64, 8, 152064),
        _qwen2_5_vl(8192, 3456),
    ),
    "qwen3-vl-4b": _config(
        "qwen3_vl", _text("qwen3", 36, 2560, 9728, 32, 8, 151936, head_dim=128),
        _qwen3_vl(24, 1024, 4096, 2560, [5, 11, 17]), tie_word_embeddings=True,
    ),
    "qwen3-vl-8b": _config(
        "qwen3_vl", _text("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
        _qwen3_vl(27, 1152, 4304, 4096, [8, 16, 24]),
    ),
    "qwen3-vl-32b": _config(
        "qwen3_vl", _text("qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128),
        _qwen3_vl(27, 1152, 4304, 5120, [8, 16, 24]),
    ),
    "qwen3-vl-30b-a3b": _config(
        "qwen3_vl_moe", _text("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, **_A3B),
        _qwen3_vl(27, 1152, 4304, 2048, [8, 16, 24]),
    ),
    "llava-1.5-7b": _config(
        "llava", _text("llama", 32, 4096, 11008, 32, 32, 32064),
        _CLIP, **_LLAVA,
    ),
    "llava-1.5-13b": _config(
        "llava", _text("llama", 40, 5120, 13824, 40, 40, 32064),
        _CLIP, **_LLAVA,
    ),
    "internvl3-8b": _config(
        "internvl", _text("qwen2", 28, 3584, 18944, 28, 4, 151674),
        _INTERN_300M,
    ),
    "internvl3-78b": _config(
        "internvl", _text("qwen2", 80, 8192, 29568, 64, 8, 151674),
        _INTERN_6B,
    ),
    "internvl3.5-8b": _config(
        "internvl", _text("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
        _INTERN_300M,
    ),
    "internvl3.5-38b": _config(
        "internvl", _text("qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128),
        _INTERN_6B,
    ),
    "internvl3.5-30b-a3b": _config(
        "internvl", _text("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, **_A3B),
        _INTERN_300M,
    ),
    "llava-onevision-7b": _config(
        "llava_onevision", _text("qwen2", 28, 3584, 18944, 28, 4, 152000),
        _tower("siglip_vision_model", 26, 1152, 4304, 16, 384, 14),
    ),
    "smolvlm2-500m": _config(
        "smolvlm", _text("llama", 32, 960, 2560, 15, 5, 49280),
        _tower("smolvlm_vision", 12, 768, 3072, 12, 512, 16), scale_factor=4,
    ),
    "smolvlm2-2.2b": _config(
        "smolvlm", _text("llama", 24, 2048, 8192, 32, 32, 49280),
        _SMALL_SIGLIP, scale_factor=3,
    ),
    "smolvlm-2.2b": _config(
        "smolvlm", _text("llama", 24, 2048, 8192, 32, 32, 49280),
        _SMALL_SIGLIP, scale_factor=3,
    ),
    "gemma-3-4b": _config(
        "gemma3", _text("gemma3_text", 34, 2560, 10240, 8, 4, 262208, head_dim=256, **_GEMMA_WINDOW),
        _SIGLIP, mm_tokens_per_image=256,
    ),
    "gemma-3-12b": _config(
        "gemma3", _text("gemma3_text", 48, 3840, 15360, 16, 8, 262208, head_dim=256, **_GEMMA_WINDOW),
        _SIGLIP, mm_tokens_per_image=256,
    ),
    "gemma-3-27b": _config(
        "gemma3", _text("gemma3_text", 62, 5376, 21504, 32, 16, 262208, head_dim=128, **_GEMMA_WINDOW),
        _SIGLIP, mm_tokens_per_image=256,
    ),
    "qwen2-audio-7b": {
        "model_type": "qwen2_audio",
        "text_config": _text("qwen2", 32, 4096, 11008, 32, 32, 156032),
        "audio_config": {
            "encoder_layers": 32, "d_model": 1280, "encoder_ffn_dim": 5120, "encoder_attention_heads": 20,
            "num_mel_bins": 128, "max_source_positions": 1500,
        },
    },
    # in the manner of MetaQueries (arXiv 2504.06256): learned queries in a Qwen2.5-VL, from which Sana draws
    "metaquery-3b": _config(
        "qwen2_5_vl", _text("qwen2", 36, 2048, 11008, 16, 2, 151936),
        _qwen2_5_vl(2048, 3420), tie_word_embeddings=True, generator_config=_SANA, num_queries=64,
    ),
    "metaquery-7b": _config(
        "qwen2_5_vl", _text("qwen2", 28, 3584, 18944, 28, 4, 152064),
        _qwen2_5_vl(3584, 3420), generator_config=_SANA, num_queries=64,
    ),
    "qwen2.5-omni-3b": _omni(_text("qwen2_5_omni_text", 36, 2048, 11008, 16, 2, 151936), _qwen2_5_vl(2048, 3420)),
    "qwen2.5-omni-7b": _omni(_text("qwen2_5_omni_text", 28, 3584, 18944, 28, 4, 152064), _qwen2_5_vl(3584, 3420)),
}
"""Name -> its dimensions, in the words of Hugging Face."""
# fmt: on


def named_model(name: str) -> ModuleDescription:
    """A public model by its name.

    Raises:
        PlanningError: no model has that name.
    """
    if name not in CONFIGS:
        near = get_close_matches(name, CONFIGS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PlanningError(f"There is no model {name!r}.{hint} Known are {', '.join(CONFIGS)}.")
    return describe_config(CONFIGS[name], name)
