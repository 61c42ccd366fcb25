"""Certificates: families that train have the loss and gradients of Hugging Face's whole model; leaks are refused."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import flowtrain_lightning as flow
from flowtrain_lightning.cli import main
from flowtrain_lightning.models import (
    AnyVLM,
    LlavaVLM,
    certificate_of,
    certify,
    kept_certificates,
    module_class,
    read_config,
)
from flowtrain_lightning.models.family_traits import Traits
from flowtrain_lightning.models.found_traits import traits_of
from flowtrain_lightning.models.packed_scans import is_scan
from flowtrain_lightning.models.published_config import usual_config
from flowtrain_lightning.models.twin import WINDOW, twin_config
from tests.models.tiny import FAMILIES

transformers = pytest.importorskip("transformers")

_QUICK = {("llava with clip", True), *((name, False) for name in ("qwen2_vl", "gemma3", "internvl", "smolvlm"))}
_EITHER = ("llava with clip", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "internvl", "smolvlm")
"""By the class that they have here, and by the one that takes any family."""

_WITHOUT_A_CLASS = (
    *("mistral3", "lighton_ocr", "glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glmga", "idefics3", "idefics2"),
    *("aya_vision", "exaone4_5", "cosmos3_edge", "cosmos3_omni", "deepseek_vl", "qianfan_ocr", "vipllava"),
    *("hyperclovax_vision_v2", "minimax_m3_vl", "aria", "ernie4_5_vl_moe", "video_llama_3", "llava_next"),
    *("llava_next_video", "qwen3_5", "qwen3_5_moe", "lfm3_vl", "gemma4"),
)
_QUICK_BY_NAME = ("lfm3_vl",)
_MOST_SECONDS = 60.0


def config_of(family: str) -> Any:
    return read_config(FAMILIES[family].config)


def published(family: str) -> Any:
    """The config that ``transformers`` makes of a family by itself, as large as it was published."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    return usual_config(family)


@pytest.mark.parametrize(
    ("family", "by_any"),
    [
        pytest.param(name, by_any, marks=() if (name, by_any) in _QUICK else pytest.mark.full)
        for name in _EITHER
        for by_any in (False, True)
    ],
)
def test_a_family_trains_as_hugging_faces_whole_model(family, by_any):
    config = config_of(family)
    found = certify(config, AnyVLM if by_any else module_class(config.model_type))
    assert (found.verdict, found.reason) == ("exact", "")
    assert found.leak is not None
    assert found.leak <= 1e-12


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in _QUICK_BY_NAME else pytest.mark.full) for name in _WITHOUT_A_CLASS],
)
def test_a_family_without_a_class_trains_by_its_usual_config_within_a_minute(family):
    begin = time.process_time()
    found = certify(published(family), AnyVLM)
    assert (found.verdict, found.module, found.reason) == ("exact", "AnyVLM", "")
    assert time.process_time() - begin < _MOST_SECONDS


_GEMMA4 = {
    "shared keys and values": {"num_kv_shared_layers": 10, "use_double_wide_mlp": True},
    "images that see ahead in windows": {"use_bidirectional_attention": "vision"},
    "experts beside perceptrons": {
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
}
"""As Gemma 4 is published in several sizes."""


@pytest.mark.full
@pytest.mark.parametrize("size", _GEMMA4)
def test_gemma_4_trains_in_all_forms_that_its_sizes_have(size):
    given = published("gemma4").to_dict()
    found = certify(read_config({**given, "text_config": {**given["text_config"], **_GEMMA4[size]}}), AnyVLM)
    assert (found.verdict, found.reason) == ("exact", "")


def test_a_twin_keeps_layers_that_have_the_keys_and_values_of_others():
    text = {"num_hidden_layers": 30, "num_kv_shared_layers": 10}
    twin = twin_config(transformers.Gemma4Config(text_config=text)).text_config
    assert 0 < twin.num_kv_shared_layers < twin.num_hidden_layers < 30
    own = twin.num_hidden_layers - twin.num_kv_shared_layers
    assert set(twin.layer_types[own:]) <= set(twin.layer_types[:own])


class CausalGemma(flow.models.HuggingFaceVLM):
    """Gemma 3 whose image tokens do not see each other, as packed attention without a mask has it."""

    families = ("gemma3",)
    halves = flow.models.GemmaVLM.halves

    def encode(self, media: Any) -> Any:
        return self.model.model.get_image_features(media.images(), return_dict=True).pooler_output.flatten(0, 1)


def test_a_lost_mask_is_refused_with_its_figure():
    config = {**FAMILIES["gemma3"].config}
    config["text_config"] = {**config["text_config"], "layer_types": ["full_attention", "full_attention"]}
    found = certify(read_config(config), CausalGemma)
    assert not found.trains
    assert found.error is not None
    assert found.error > 1e-3
    assert "off what Hugging Face's whole model has sample by sample" in found.reason


class Untold(AnyVLM):
    """A family whose scans and convolutions are not told where sequences begin, as without `pack_scans`."""

    def pack_backbone(self) -> None:
        super().pack_backbone()
        for module in self.model.modules():
            if is_scan(module):
                module.register_forward_pre_hook(_without_bounds, with_kwargs=True)


def _without_bounds(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if not name.startswith("cu_seq_lens")}


@pytest.mark.full
@pytest.mark.parametrize("family", ["lfm3_vl", "qwen3_5"])
def test_scans_and_convolutions_that_cross_samples_are_refused_with_their_figure(family):
    found = certify(published(family), Untold)
    assert not found.trains
    assert found.error is not None
    assert found.error > 1e-6
    assert "of the backbone is" in found.reason or "of the encoder is" in found.reason


@pytest.mark.full
@pytest.mark.parametrize("family", ["chameleon", "perception_lm", "ovis2", "instructblip", "diffusion_gemma", "fuyu"])
def test_what_cannot_be_compared_is_refused_in_a_sentence_for_its_user(family):
    found = certify(published(family), AnyVLM)
    assert not found.trains
    assert found.reason.endswith(".")
    assert not re.search(r"Error|NoneType|\[\d|unexpected keyword|object has no", found.reason), found.reason


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "sight"), [("llava", "packed"), ("gemma3", "images"), ("aya_vision", "windows"), ("mistral3", "packed")]
)
def test_which_tokens_see_which_is_found_out(family, sight):
    traits: Traits = traits_of(published(family))
    assert traits.sight == sight
    assert traits.halves["encoder"] == ("model.vision_tower", "model.multi_modal_projector")
    assert traits.halves["backbone"] == ("model.language_model", "lm_head")


def test_a_twin_has_every_kind_of_layer_and_windows_shorter_than_its_samples():
    config = transformers.Gemma3Config(text_config={"num_hidden_layers": 26, "sliding_window": 4096})
    twin = twin_config(config)
    assert set(twin.text_config.layer_types) == set(config.text_config.layer_types)
    assert twin.text_config.num_hidden_layers == len(twin.text_config.layer_types) < 26
    assert twin.text_config.sliding_window == WINDOW
    assert twin.image_token_id < twin.text_config.vocab_size


_CLIP, _IDEFICS3 = FAMILIES["llava with clip"].config, {**FAMILIES["smolvlm"].config, "model_type": "idefics3"}
_SIZES: dict[str, dict[str, Any]] = {
    "three rows and columns of patches joined": {
        **_IDEFICS3,
        "scale_factor": 3,
        "vision_config": {**_IDEFICS3["vision_config"], "model_type": "idefics3_vision", "image_size": 384},
    },
    "nine patches merged": {
        **FAMILIES["qwen2_vl"].config,
        "vision_config": {**FAMILIES["qwen2_vl"].config["vision_config"], "spatial_merge_size": 3},
    },
    "features of an early layer": {
        **_CLIP,
        "vision_feature_layer": 5,
        "vision_config": {**_CLIP["vision_config"], "num_hidden_layers": 12},
    },
    "three heads": {
        **_CLIP,
        "vision_config": {**_CLIP["vision_config"], "hidden_size": 48, "num_attention_heads": 3},
    },
    "factors of rotary positions": {
        **_CLIP,
        "text_config": {
            **_CLIP["text_config"],
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 256,
            },
        },
    },
}
"""As SmolVLM-Instruct's, and others that were published in some size."""


@pytest.mark.parametrize("size", _SIZES)
def test_sizes_that_four_patches_and_four_heads_do_not_fit_are_compared_too(size):
    config = read_config(_SIZES[size])
    found = certify(config, module_class(config.model_type))
    assert (found.verdict, found.reason) == ("exact", "")


class HidesNaN(LlavaVLM):
    """LLaVA whose gradients are NaN, and whose loss is right."""

    def merge(self, batch: Any, features: Any) -> Any:
        given = super().merge(batch, features)
        nothing = (given["inputs_embeds"] - given["inputs_embeds"]).square().sum().sqrt()
        return given | {"inputs_embeds": given["inputs_embeds"] + nothing}


def test_gradients_that_are_no_numbers_are_refused_and_told_as_json():
    found = certify(config_of("llava with clip"), HidesNaN)
    assert not found.trains
    assert "is NaN or infinite" in found.reason
    assert "Infinity" not in json.dumps(found.as_data())


_OF_LAYERS = {"r": 2, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [20, 21]}
_SETTINGS: dict[str, dict[str, Any]] = {
    "dropout of adapters": {"adapters": {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.1}},
    "adapters of layers by number": {"adapters": _OF_LAYERS},
    "adapters by a path": {"adapters": {"r": 2, "target_modules": r".*language_model.*layers\.2\d\..*q_proj"}},
    "frozen layers by number": {"frozen": ["model.language_model.layers.20", "model.vision_tower"]},
}


@pytest.mark.parametrize("name", _SETTINGS)
def test_settings_that_a_twin_cannot_have_refuse_no_family(name):
    settings = {**_SETTINGS[name]}
    if "adapters" in settings:
        settings["adapters"] = pytest.importorskip("peft").LoraConfig(**settings["adapters"]).to_dict()
    found = certify(config_of("llava with clip"), LlavaVLM, settings)
    assert (found.verdict, found.reason) == ("exact", "")


def test_what_was_compared_once_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def compare(config: Any, kind: Any, settings: Any = None) -> flow.models.Certificate:
        asked.append(config.model_type)
        return flow.models.Certificate(config.model_type, "LlavaVLM", True, 1e-15, "lm_head.weight", "backbone", 0.0)

    monkeypatch.setattr(kept_certificates, "certify", compare)
    first, second = (certificate_of(config_of("llava with clip"), LlavaVLM) for _ in range(2))
    assert first == second
    assert asked == ["llava"]
    certificate_of(config_of("llava with clip"), LlavaVLM, {"recompute": True})
    certificate_of(config_of("llava with siglip"), LlavaVLM)
    assert asked == ["llava"] * 3


def test_a_twin_that_its_own_class_cannot_read_proves_nothing():
    found = flow.models.Certificate("llava_onevision", "OnevisionVLM", False, reason="It got no pictures.")
    assert found.verdict == "not compared"
    assert found.sentence.startswith("llava_onevision was not compared, so nothing is proven: It got no pictures.")
    assert flow.models.Certificate("git", "", False, reason="It has no halves.").verdict == "refused"


def checked(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of ``flowtrain check``."""
    monkeypatch.setattr(sys, "argv", ["flowtrain", "check", *arguments])
    try:
        main()
    except SystemExit as end:
        return 1 if isinstance(end.code, str) else int(end.code or 0)
    return 0


def test_the_command_prints_the_certificate_of_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config_of("llava with clip").save_pretrained(tmp_path / "model")
    assert checked(monkeypatch, str(tmp_path / "model"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["family"], found["trains"], found["verdict"]) == ("llava", True, "exact")
    assert checked(monkeypatch, "--json", str(tmp_path / "model")) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert checked(monkeypatch, str(tmp_path / "model")) == 0
    assert capsys.readouterr().out.startswith("llava trains: a twin in two halves, packed, has the loss")


def test_the_command_says_what_is_no_model(tmp_path, monkeypatch):
    for model, said in (("lava", "Did you mean 'llava'"), (str(tmp_path), "has no config.json; give the folder")):
        monkeypatch.setattr(sys, "argv", ["flowtrain", "check", model])
        with pytest.raises(SystemExit, match=said):
            main()


def test_the_command_ends_with_1_where_a_family_is_refused(monkeypatch, capsys):
    assert checked(monkeypatch, "blip") == 1
    assert "blip is refused: BlipForConditionalGeneration has no get_image_features" in capsys.readouterr().out
