"""What planning knows of a model is what its own classes say: halves and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain_lightning.allocator import PlanningError, named_model
from flowtrain_lightning.allocator.public_models import CONFIGS
from flowtrain_lightning.cli.plan_input import read_module
from flowtrain_lightning.models.described import counted, described
from flowtrain_lightning.models.published_config import usual_config

transformers = pytest.importorskip("transformers")

_QUICK = ("smolvlm2-500m",)


def weights_of(name: str) -> dict[str, int]:
    given = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    if given.get("vision_config", {}).get("model_type") == "siglip_vision_model":
        given["vision_config"] = {**given["vision_config"], "vision_use_head": False}  # as they are published
    if CONFIGS[name]["model_type"] == "internvl":
        given["tie_word_embeddings"] = given["text_config"].get("tie_word_embeddings", False)
    config = transformers.CONFIG_MAPPING[CONFIGS[name]["model_type"]](**given)
    if config.model_type != "qwen2_audio":
        return counted(config)
    with torch.device("meta"):
        model = transformers.Qwen2AudioForConditionalGeneration(config)
    sizes = {path: weight.numel() for path, weight in model.named_parameters()}
    encoder = sum(size for path, size in sizes.items() if "audio_tower" in path or "projector" in path)
    return {"encoder": encoder, "backbone": sum(sizes.values()) - encoder}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in _QUICK else pytest.mark.full) for each in CONFIGS]
)
def test_the_halves_of_a_named_model_have_the_weights_of_its_own_classes(name):
    planned, built = named_model(name).roles, weights_of(name)
    for role, half in planned.items():
        assert half.parameters == pytest.approx(built[role], rel=0.015), role


@pytest.mark.full
@pytest.mark.parametrize("family", ["mistral3", "qwen3_5"])
def test_a_config_that_no_reader_knows_is_read_by_the_classes_of_its_family(tmp_path: Path, family: str):
    config = usual_config(family)
    file = tmp_path / family / "config.json"
    config.save_pretrained(file.parent)
    module, built = read_module(str(file)), counted(config)
    assert module.name == family
    for role, half in module.roles.items():
        assert half.parameters == pytest.approx(built[role], rel=0.02), role
    assert module.encoders["image"].result[0] == config.get_text_config().hidden_size


@pytest.mark.full
@pytest.mark.parametrize("family", ["glm4v", "ernie4_5_vl_moe"])
def test_a_family_whose_config_describes_other_weights_than_it_has_is_refused(tmp_path: Path, family: str):
    usual_config(family).save_pretrained(tmp_path / family)
    with pytest.raises(PlanningError, match=rf"{family} has .* in its encoder, but its config describes .* dimensions"):
        read_module(str(tmp_path / family / "config.json"))


def test_a_config_of_no_certified_family_is_refused_with_its_reason(tmp_path: Path):
    config: dict[str, Any] = json.loads(usual_config("blip").to_json_string())
    with pytest.raises(PlanningError, match=r"blip is refused: BlipForConditionalGeneration has no get_image_features"):
        described(config, "mine")
