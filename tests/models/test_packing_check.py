"""The packing check on models of Hugging Face: none of ours is accused, and what packing would change is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import flowtrain_lightning as flow
from flowtrain_lightning.packing_check import report_of
from tests.models.tiny import FAMILIES
from tests.tiny import CharTokenizer, tiny_data, write_records

_IMAGE = CharTokenizer.specials.index("<|image_pad|>")
_QUICK = ("qwen2_5_vl", "internvl", "gemma3")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 16)
    return folder


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in _QUICK else pytest.mark.full) for name in FAMILIES],
)
def test_no_family_is_accused(records, family):
    chosen = FAMILIES[family]
    module = chosen.kind(chosen.config, recompute=family == "internvl")
    assert flow.check(module, tiny_data(records, images=chosen.images, token_budget=400)) == []


class Gemma3(flow.models.HuggingFaceVLM):
    """As the guide's other family, without a mask of its own."""

    families = ("gemma3",)
    halves = flow.models.GemmaVLM.halves

    def encode(self, media: Any) -> Any:
        return self.model.model.get_image_features(media.images(), return_dict=True).pooler_output.flatten(0, 1)


class Gemma4(Gemma3):
    """Its image tokens see each other where its config says so."""

    families = ("gemma4",)


class LFM2(flow.models.HuggingFaceVLM):
    """A decoder with short convolutions, which know of no bounds."""

    families = ("lfm2_vl",)
    halves = {  # noqa: RUF012
        "encoder": ("model.model.vision_tower", "model.model.multi_modal_projector"),
        "backbone": ("model.model.language_model", "model.lm_head"),
    }


def lfm2() -> dict[str, Any]:
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": CharTokenizer.vocabulary,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Lfm2VlConfig(text_config=text, vision_config=tower, image_token_id=_IMAGE).to_dict()


def test_a_family_whose_image_tokens_see_ahead_is_refused_where_it_has_no_mask(records):
    chosen = FAMILIES["gemma3"]
    config = {**chosen.config, "text_config": {**chosen.config["text_config"], "sliding_window": 512}}
    (finding,) = report_of(Gemma3(config), tiny_data(records, images=chosen.images, token_budget=400)).findings
    assert "even one sample alone gives something else than the model's own forward" in finding.sentence


def test_a_family_with_convolutions_between_tokens_is_refused(tmp_path):
    write_records(tmp_path, 16, images=False)
    (finding,) = report_of(LFM2(lfm2()), tiny_data(tmp_path)).findings
    assert "a sample sees the tokens of others in its microbatch" in finding.sentence
