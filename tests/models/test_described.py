"""What planning knows of a model is what its own classes say: halves and weights."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain_lightning.allocator import PlanningError, named_model
from flowtrain_lightning.allocator.module_parts import MixtureOfExperts
from flowtrain_lightning.allocator.public_models import CONFIGS
from flowtrain_lightning.cli.plan_input import read_module
from flowtrain_lightning.models.described import counted, described
from flowtrain_lightning.models.described_layers import LayerKind, described_layers
from flowtrain_lightning.models.published_config import usual_config

transformers = pytest.importorskip("transformers")

NEEDS_TORCHVISION = pytest.param(
    "lfm2_vl",
    marks=pytest.mark.skipif(find_spec("torchvision") is None, reason="it needs torchvision"),
)

_WITHOUT_A_READER = (
    *("aria", "aya_vision", "cohere2_vision", "cosmos3_edge", "cosmos3_omni", "deepseek_vl", "ernie4_5_vl_moe"),
    *("exaone4_5", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "got_ocr2", "hyperclovax_vision_v2"),
    *("idefics2", "lfm3_vl", "lighton_ocr", "llava_next", "llava_next_video", "minimax_m3_vl", "mistral3"),
    *("paligemma", "qianfan_ocr", "qwen3_5", "qwen3_5_moe", "shieldgemma2", "video_llama_3", "vipllava"),
)
"""Families that ``flowtrain check`` certifies, and whose configs the allocator reads by no reader of its own."""

_WITH_AUDIO = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
}
"""Type of a model that hears -> its class."""

_QUICK = ("smolvlm2-500m",)


def weights_of(name: str) -> dict[str, int]:
    given = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    if given.get("vision_config", {}).get("model_type") == "siglip_vision_model":
        given["vision_config"] = {**given["vision_config"], "vision_use_head": False}  # as they are published
    if CONFIGS[name]["model_type"] == "internvl":
        given["tie_word_embeddings"] = given["text_config"].get("tie_word_embeddings", False)
    config = transformers.CONFIG_MAPPING[CONFIGS[name]["model_type"]](**given)
    if config.model_type not in _WITH_AUDIO:
        return counted(config)
    with torch.device("meta"):
        model = getattr(transformers, _WITH_AUDIO[config.model_type])(config)
    planned = named_model(name)
    sizes = dict.fromkeys(planned.roles, 0)
    for path, weight in model.named_parameters():
        heard, seen = "audio_tower" in path or "projector" in path, "visual" in path
        role = planned.role_of("audio" if heard else "image") if heard or seen else "backbone"
        sizes[role] += weight.numel()
    return sizes


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in _QUICK else pytest.mark.full) for each in CONFIGS]
)
def test_the_halves_of_a_named_model_have_the_weights_of_its_own_classes(name):
    planned = named_model(name).roles
    for role, weights in weights_of(name).items():  # a metaquery generates with another class
        assert planned[role].parameters == pytest.approx(weights, rel=0.015), role


@pytest.mark.full
@pytest.mark.parametrize("family", [*_WITHOUT_A_READER, NEEDS_TORCHVISION])
def test_a_config_that_no_reader_knows_is_read_by_the_classes_of_its_family(tmp_path: Path, family: str):
    config = usual_config(family)
    if family == "aya_vision":
        config.vision_config.num_attention_heads = 16  # the 14 of its usual config fit no model of its width
    file = tmp_path / family / "config.json"
    config.save_pretrained(file.parent)
    module, built = read_module(str(file)), counted(config)
    assert module.name == family
    text, vision = config.get_text_config(), config.vision_config
    for role, half in module.roles.items():
        assert half.parameters == built[role], role
    assert module.backbone.depth == text.num_hidden_layers
    encoder = module.encoders["image"]
    layers = next(getattr(vision, name) for name in ("num_hidden_layers", "depth") if hasattr(vision, name))
    assert encoder.depth >= layers
    assert encoder.result[0] % text.hidden_size == 0
    assert module.backbone.result == (text.vocab_size, 1.0)


def test_layers_have_the_weights_and_the_attention_of_their_modules():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Qwen3MoeConfig(
        **sizes, intermediate_size=96, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2
    )
    config.num_hidden_layers, config.mlp_only_layers, config.sliding_window = 3, [0], 24
    blocks = list(transformers.Qwen3MoeModel(config).layers)
    kinds = [LayerKind.of(block, number) for number, block in enumerate(blocks)]
    assert kinds[1] == kinds[2] != kinds[0]
    dense, sparse = described_layers(blocks[:1], None, causal=True), described_layers(blocks[1:], 24, causal=True)
    for layers, own in ((dense, blocks[:1]), (sparse, blocks[1:])):
        weights = sum(weight.numel() for block in own for weight in block.parameters())
        assert weights * 0.99 <= layers.parameters <= weights
        assert (layers.heads, layers.key_value_heads, layers.head_size, layers.gated) == (4, 2, 16, True)
    assert dense.feed_forward == 96
    assert (sparse.count, sparse.window) == (2, 24)
    assert sparse.experts == MixtureOfExperts(8, 2, 32)


def test_a_config_of_no_certified_family_is_refused_with_its_reason(tmp_path: Path):
    config: dict[str, Any] = json.loads(usual_config("blip").to_json_string())
    with pytest.raises(PlanningError, match=r"blip is refused: BlipForConditionalGeneration has no get_image_features"):
        described(config, "mine")


@pytest.mark.parametrize("name", ["qwen3-vl-4b", "gemma-3-4b", "qwen2.5-vl-3b"])
def test_norms_of_a_decoder_are_those_that_its_classes_build(name):
    config = {**CONFIGS[name], "text_config": {**CONFIGS[name]["text_config"], "num_hidden_layers": 2}}
    assert described(config, name).backbone.layers[0].norms == named_model(name).backbone.layers[0].norms
