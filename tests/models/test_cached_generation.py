"""Predictions by transformers' own generate: what computing all anew gives, but every token is read once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowtrain_lightning.compute.generation import generate_greedily
from tests.models.test_families import Samples
from tests.models.tiny import FAMILIES

transformers = pytest.importorskip("transformers")

TOKENS = 6


LONGER = [pytest.param(name, marks=pytest.mark.full) for name in ("qwen2_vl", "llava with clip", "internvl")]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", *LONGER])
def test_predictions_are_those_of_computing_all_anew_and_read_every_token_once(tmp_path, family):
    module, batch, features = prompted(tmp_path, family)
    expected = generate_greedily(module, batch, features)
    read: list[int] = []
    module.get_submodule(module.halves["backbone"][0]).layers[0].register_forward_pre_hook(
        lambda _, arguments, named: read.append((arguments[0] if arguments else named["hidden_states"]).shape[1]),
        with_kwargs=True,
    )
    module.set_local_roles(("backbone",))
    module.drop_absent_roles()  # a backbone rank has no encoder
    found = module.generate(batch, features)
    assert found == expected
    prompts, answers = int(batch.cu_seqlens[len(batch.samples)]), sum(min(len(ids) + 1, TOKENS) for _, ids in found)
    assert sum(read) == prompts + answers - len(found)  # the last token of each is never read
    assert generate_greedily(module, batch, features) == expected  # packed attention is back


@pytest.mark.parametrize(
    "own", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 5}], ids=str
)
def test_settings_of_the_models_own_change_no_prediction(tmp_path, own):
    module, batch, features = prompted(tmp_path, "qwen2_5_vl", generation=own)
    settings = module.model.generation_config
    assert module.generate(batch, features) == generate_greedily(module, batch, features)
    assert module.model.generation_config is settings


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_where_generate_cannot_take_what_merge_gives_all_is_computed_anew(tmp_path, family):
    module, batch, features = prompted(tmp_path, family)
    assert module.generate(batch, features) == generate_greedily(module, batch, features)


def test_a_model_that_begins_with_no_embeddings_computes_all_anew(tmp_path, monkeypatch):
    module, batch, features = prompted(tmp_path, "qwen2_5_vl")

    def prepare(self: Any, input_ids: Any, **others: Any) -> Any:
        raise AssertionError("generate was called, which refuses embeddings of such a model")

    expected = generate_greedily(module, batch, features)
    monkeypatch.setattr(type(module.model), "prepare_inputs_for_generation", prepare)
    assert module.generate(batch, features) == expected


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_predictions_end_at_any_of_the_tokens_with_which_a_model_ends(tmp_path, family):
    _, plain = min(predictions(prompted(tmp_path, family)), key=lambda each: each[1])
    ends = {"eos_token_id": [10_000, plain[2]]}  # such as Gemma 3's end of a text, and of a turn
    found = dict(predictions(prompted(tmp_path, family, generation=ends)))
    assert plain[: plain.index(plain[2])] in found.values()


def predictions(given: tuple[Any, Any, dict[str, Any]]) -> list[tuple[int, list[int]]]:
    module, batch, features = given
    return module.generate(batch, features)


def test_predictions_of_paligemma_are_refused(tmp_path):
    module, batch, features = prompted(tmp_path, "paligemma 2")
    with pytest.raises(NotImplementedError, match="PaliGemma's predictions are not computed here"):
        module.generate(batch, features)


def prompted(folder: Any, family: str, **settings: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A module, a microbatch of four prompts, and the features of its images."""
    samples = Samples(folder, FAMILIES[family])
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        module = FAMILIES[family].kind(FAMILIES[family].config, max_new_tokens=TOKENS, **settings)
        module.configure_model()
        module.eval()
        batch, media = samples.packed
        with torch.no_grad():
            return module, batch, {"image": module.encode(media)}
    finally:
        torch.set_default_dtype(torch.float32)
