"""Families that no class here trains, as users load them by the guide's way: their halves named, one encode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import Tensor

import flowtrain_lightning as flow
from flowtrain_lightning.data import PackedMedia
from tests.models.tiny import FAMILIES
from tests.tiny import CharTokenizer

_IMAGE = CharTokenizer.specials.index("<|image_pad|>")
_V = CharTokenizer.vocabulary
_WIDTH = 32
_TEXT = {
    "hidden_size": _WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": _V,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
    "num_hidden_layers": 2,
}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}


class AnyFamily(flow.models.HuggingFaceVLM):
    """A family whose decoder is looked at, so that rows of features are pixels times a weight of the tower."""

    def encode(self, media: PackedMedia) -> Tensor:
        towers = map(self.get_submodule, self.halves["encoder"])
        weight = next(weight for tower in towers for weight in tower.parameters() if weight.ndim > 1)
        return media.patches.reshape(sum(media.rows), -1)[:, :_WIDTH] * (1 + weight.mean())


@dataclass(frozen=True)
class Foreign:
    """A family's name, its config, and paths of its halves below ``model.model``.

    Attributes:
        family: ``model_type``.
        made_by: class of ``transformers`` that makes the config; empty where ``config`` is all.
        config: its arguments.
        encoder: paths of the encoder.
    """

    family: str
    made_by: str
    config: Mapping[str, Any]
    encoder: tuple[str, ...] = field(default=("vision_tower", "multi_modal_projector"))

    @property
    def is_installed(self) -> bool:
        """Whether this version of transformers knows it."""
        return not self.made_by or hasattr(transformers, self.made_by)

    def module(self) -> AnyFamily:
        """A module of it, not built yet."""
        halves = {
            "encoder": tuple(f"model.model.{path}" for path in self.encoder),
            "backbone": ("model.model.language_model", "model.lm_head"),
        }
        kind = type(f"Any_{self.family}", (AnyFamily,), {"families": (self.family,), "halves": halves})
        config = getattr(transformers, self.made_by)(**self.config).to_dict() if self.made_by else self.config
        made: AnyFamily = kind(config)
        return made


def _gemma4(sees: str | None) -> Foreign:
    text = {**_TEXT, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8}
    text |= {"use_bidirectional_attention": sees, "hidden_size_per_layer_input": 0}
    tower = {**_TOWER, **_HEADS, "patch_size": 4, "position_embedding_size": 64}
    tokens = {"image_token_id": _IMAGE, "video_token_id": _V - 1, "audio_token_id": _V - 2}
    config = {"text_config": text, "vision_config": tower, "audio_config": None, **tokens}
    return Foreign("gemma4", "Gemma4Config", config, ("vision_tower", "embed_vision"))


def _qwen3_5(*layers: str) -> Foreign:
    text = {**_TEXT, "layer_types": list(layers), "rope_parameters": _ROTARY}
    text |= {f"linear_{what}_head_dim": 8 for what in ("key", "value")}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": _WIDTH}
    tower |= {"patch_size": 4, "num_position_embeddings": 16}
    tokens = {"image_token_id": _IMAGE, "video_token_id": _V - 1, "vision_start_token_id": _V - 2}
    return Foreign("qwen3_5", "Qwen3_5Config", {"text_config": text, "vision_config": tower, **tokens}, ("visual",))


def _lfm2() -> Foreign:
    text = {key: value for key, value in _TEXT.items() if key != "head_dim"}
    text |= {"layer_types": ["conv", "full_attention"]}
    return Foreign("lfm2_vl", "Lfm2VlConfig", {"text_config": text, "vision_config": _TOWER, "image_token_id": _IMAGE})


def _lfm3() -> Foreign:
    text = {**_TEXT, "layer_types": ["conv", "full_attention"]}
    tower = {**_TOWER, "num_key_value_heads": 1, "layer_types": ["full_attention"], "patch_size": 4}
    tokens = {"image_token_id": _IMAGE, "video_token_id": _V - 1}
    config = {"text_config": text, "vision_config": tower, "projector_hidden_size": 16, **tokens}
    return Foreign("lfm3_vl", "Lfm3VlConfig", config)


def _molmo2() -> Foreign:
    tower = {**_TOWER, **_HEADS, "num_hidden_layers": 2, "image_size": [16, 16], "patch_size": 4}
    adapter = {key: value for key, value in {**_TOWER, **_HEADS}.items() if key != "num_hidden_layers"}
    adapter |= {"text_hidden_size": _WIDTH, "vision_feature_layer": [-1, 0]}
    config = {"text_config": _TEXT, "vision_config": tower, "adapter_config": adapter, "image_patch_id": _IMAGE}
    return Foreign("molmo2", "Molmo2Config", config)


FOREIGN = {
    "lfm2_vl": _lfm2(),
    "lfm3_vl": _lfm3(),
    "gemma4": _gemma4(None),
    "gemma4 that sees images whole": _gemma4("vision"),
    "molmo2": _molmo2(),
    "qwen3_5 of attention": _qwen3_5("full_attention", "full_attention"),
    "qwen3_5": _qwen3_5("linear_attention", "full_attention"),
    "qwen2_vl": Foreign("qwen2_vl", "", FAMILIES["qwen2_vl"].config, ("visual",)),
    "qwen3_vl": Foreign("qwen3_vl", "", FAMILIES["qwen3_vl"].config, ("visual",)),
}
