"""Small live Hugging Face models, and their FLOPs as torch counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
ROTARY = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
VISION = {"hidden_size": 48, "intermediate_size": 100, "num_heads": 4, "depth": 4, "out_hidden_size": 64}
TOWER = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
LLAMA = {**TEXT, "model_type": "llama", "head_dim": 16, "pad_token_id": 0}
QWEN2 = {**TEXT, "model_type": "qwen2"}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**TEXT, **ROTARY},
        "vision_config": {"depth": 3, "embed_dim": 48, "hidden_size": 64, "num_heads": 4},
    },
    "qwen2_5_vl": {"text_config": {**TEXT, **ROTARY}, "vision_config": {**VISION, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {
        "text_config": {**TEXT, **ROTARY, "head_dim": 16},
        "vision_config": {**VISION, "deepstack_visual_indexes": [1, 2]},
    },
    "llava": {"text_config": LLAMA, "vision_config": {**TOWER, "model_type": "clip_vision_model"}},
    "internvl": {"text_config": QWEN2, "vision_config": {**TOWER, "image_size": [56, 56], "patch_size": [14, 14]}},
    "smolvlm": {"text_config": LLAMA, "vision_config": TOWER},
    "gemma3": {
        "text_config": {**TEXT, "head_dim": 16},
        "vision_config": {**TOWER, "vision_use_head": False},
        "mm_tokens_per_image": 4,
    },
    "qwen2_audio": {
        "text_config": QWEN2,
        "audio_config": {
            "d_model": 48,
            "encoder_layers": 3,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 100,
            "max_source_positions": 40,
        },
    },
}


@dataclass(frozen=True)
class Counted:
    """FLOPs of one pass: products with weights, and attention's own."""

    dense: float
    attention: float


@dataclass(frozen=True)
class LiveModel:
    """A small model of one family, with the lengths of what its encoder reads."""

    config: dict[str, Any]
    model: Any
    lengths: np.ndarray
    encode: Callable[[], Any]

    def read(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Logits of one sequence, ``[1, tokens, width]``."""
        inner = self.model.model
        text = inner.language_model if hasattr(inner, "language_model") else inner.text_model
        return self.model.lm_head(text(inputs_embeds=embeddings, use_cache=False).last_hidden_state)


def build(kind: str) -> LiveModel:
    """A model of ``kind`` with three or four layers of width 48 and 64."""
    config = transformers.CONFIG_MAPPING[kind](**CONFIGS[kind])
    maker = transformers.AutoModelForImageTextToText
    if kind == "qwen2_audio":
        maker = transformers.Qwen2AudioForConditionalGeneration
        model = maker(config).train()
        sound, inner = torch.randn(2, 128, 80), model.model
        tower = lambda: inner.multi_modal_projector(inner.audio_tower(sound).last_hidden_state)  # noqa: E731
        return LiveModel(config.to_dict(), model, np.array([40, 40]), tower)
    model = maker.from_config(config).train()
    if "qwen" in kind:
        pixels = torch.randn(16 * 16 + 8 * 24, 6 * config.vision_config.patch_size**2)
        grid = torch.tensor([[1, 16, 16], [1, 8, 24]])
        return LiveModel(
            config.to_dict(), model, np.array([256, 192]), lambda: model.model.visual(pixels, grid_thw=grid)
        )
    pictures = torch.randn(2, 3, 56, 56)
    pictures = pictures[None] if kind == "smolvlm" else pictures
    return LiveModel(config.to_dict(), model, np.array([16, 16]), lambda: model.model.get_image_features(pictures))


def count(run: Callable[[], Any]) -> Counted:
    """What torch counts while ``run`` runs. Attention is computed by matrix products, which it counts as such."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    found = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    attention = found.pop("aten.bmm", 0)
    return Counted(sum(found.values()), attention)


def count_backward(run: Callable[[], Any]) -> Counted:
    """What torch counts in the backward of the sum of all that ``run`` gives."""
    forward = count(run)
    both = count(lambda: sum(tensor.sum() for tensor in tensors(run())).backward())
    return Counted(both.dense - forward.dense, both.attention - forward.attention)


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """The features in an encoder's output."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for one in output:
            yield from tensors(one)
    elif output is not None:
        yield from tensors(output.pooler_output)
        yield from tensors(getattr(output, "deepstack_features", None))
