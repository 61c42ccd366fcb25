"""The vision-language model that `benchmarks/gpu.py` trains, of random weights, at a public model's size or tiny."""

from __future__ import annotations

from typing import Any, Literal

from benchmarks.modules import TOKENIZER
from flowtrain_lightning.allocator.public_models import CONFIGS
from flowtrain_lightning.data import ImageProcessor
from flowtrain_lightning.data.records.tokenization import open_tokenizer
from flowtrain_lightning.models import QwenVLM

TINY = "tiny"

Layers = Literal["eager", "compiled", "liger"]
"""How PyTorch runs them: as they are, compiled, or with Liger's kernels."""

MODELS = (TINY, *(name for name, config in CONFIGS.items() if config["model_type"] in ("qwen2_vl", "qwen2_5_vl")))

_SPECIAL = {"image": "<|image_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}

_TINY: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
}


def config_of(name: str) -> dict[str, Any]:
    """The config of a model, with the ids of the tokenizer that writes the data."""
    tokenizer = open_tokenizer(TOKENIZER)
    ids = {f"{of}_token_id": tokenizer.token_to_id(token) for of, token in _SPECIAL.items()}
    if name != TINY:
        return {**CONFIGS[name], **ids}
    vocabulary = {"vocab_size": 4096, "bos_token_id": None, "eos_token_id": None}
    return {**_TINY, "text_config": {**_TINY["text_config"], **vocabulary}, **ids}


def packed_model(name: str, recompute: bool, layers: Layers = "eager") -> QwenVLM:
    """The FlowModule of the packed variants."""
    return QwenVLM(
        config_of(name),
        recompute=recompute,
        compile="blocks" if layers == "compiled" else "none",
        kernels="liger" if layers == "liger" else "none",
    )


def images_for(name: str) -> ImageProcessor:
    """Pictures of at most 1,024 patches, or of few for the tiny model."""
    return ImageProcessor(max_pixels=56 * 112 if name == TINY else 448 * 448)
