"""Hugging Face's models train with tensor and context ranks as on one process, and their checkpoints open there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flowtrain_lightning.models.tensor_plans import decoder_plan, perceptron_plan
from tests.exactness.compare import error, read_run, without_key_biases
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs
from tests.models.tiny import FAMILIES

pytest.importorskip("transformers")

TENSOR = {"tensor": 2}
BOTH = {"encoder": TENSOR, "backbone": TENSOR}
CONTEXT = {"backbone": {"context": 2}}
QUICK = [("llava with clip", "colocated 2", BOTH)]
LONG = [("llava with clip", "2+2", BOTH), ("qwen3_vl", "1+2", CONTEXT), ("qwen3_vl", "1+2", {"backbone": TENSOR})]
LONG += [
    (family, layout, roles)
    for family in ("qwen2_5_vl", "qwen2_vl, tied", "llava with siglip", "internvl")
    for layout, roles in (("2+2", BOTH), ("colocated 2", CONTEXT), ("1+4", {"backbone": {**TENSOR, "shard": "fsdp"}}))
]
LONG += [("gemma3", "1+2", {"backbone": TENSOR}), ("qwen3_vl", "1+4", {"backbone": {**TENSOR, "context": 2}})]
LONG += [("qwen3_vl_moe", "1+2", CONTEXT), ("qwen3_vl_moe", "1+4", {"backbone": {"context": 2, "shard": "fsdp"}})]
LONG += [("qwen3_vl_moe", "2+2", {"encoder": TENSOR})]
LIMIT = {"gemma3": 1e-5}
"""In other families it is that of float64; transformers computes the weights of Gemma's norms in float32."""
CASES = [pytest.param(*case, id=" ".join(map(str, case))) for case in QUICK] + [
    pytest.param(*case, id=" ".join(map(str, case)), marks=pytest.mark.full) for case in LONG
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run of a family on a layout."""
    folder = tmp_path_factory.mktemp("divided")
    write_steps(folder / "data")

    def trained(family: str, layout: str, roles: dict[str, Any]) -> Path:
        name = f"{family} {layout} {len(list(folder.iterdir()))}"
        arguments = {"data": str(folder / "data"), "layout": layout, "family": family, "roles": roles}
        job = Job(name, "tests.models.training:train", ranks_of(layout), arguments)
        return run_jobs(folder, [job])[name].check().folder

    return trained


@pytest.mark.parametrize(("family", "layout", "roles"), CASES)
def test_ranks_that_share_layers_or_sequences_compute_what_one_process_does(trained, family, layout, roles):
    folder, limit = trained(family, layout, roles), LIMIT.get(family, 1e-9)
    found, expected = read_run(folder), read_run(trained(family, "auto", {}))
    assert error(found.initial, expected.initial) == 0.0
    assert found.losses == pytest.approx(expected.losses, rel=limit)
    assert max(error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)) <= limit
    assert error(*map(without_key_biases, (found.weights[-1], expected.weights[-1]))) <= limit
    opened = FAMILIES[family].kind.load_from_checkpoint(folder / "last.ckpt")
    weights = {name: weight.detach().double() for name, weight in opened.named_parameters()}
    assert error(weights, found.weights[-1]) <= 1e-6


@pytest.mark.parametrize("given", [None, {"embed_tokens": "embedding_rowwise"}])
def test_the_layers_of_a_decoder_are_divided_where_the_plan_of_transformers_has_none(given):
    family = FAMILIES["qwen3_vl"]
    module = family.kind(family.config)
    module.configure_model()
    module.model.model.language_model.config.base_model_tp_plan = given
    plan = module.tensor_plan("backbone", 2)
    assert plan["model.model.language_model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.model.language_model.embed_tokens"] == "embedding_rowwise"


def test_tensor_ranks_share_experts_that_compute_from_stacks_and_refuse_others():
    family = FAMILIES["qwen3_vl_moe"]
    module = family.kind(family.config)
    module.configure_model()
    plan = module.tensor_plan("backbone", 2)
    assert plan["model.model.language_model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.model.language_model.layers.*"] == "divided_tokens"
    assert not any(".mlp" in name for name in plan)
    decoder, head = decoder_of("gpt_oss")
    with pytest.raises(ValueError, match=r"GptOssModel has experts of a kind of their own .* 2 tensor ranks cannot"):
        decoder_plan(decoder, head, {decoder: "text", head: "head"}, 2)


def test_heads_that_tensor_ranks_cannot_share_evenly_are_refused():
    family = FAMILIES["qwen3_vl"]
    module = family.kind(family.config)
    module.configure_model()
    assert module.tensor_plan("backbone", 2)["model.lm_head"] == "colwise_gather_output"
    with pytest.raises(ValueError, match=r"num_key_value_heads 2 .*which 4 tensor ranks cannot share"):
        module.tensor_plan("backbone", 4)


def decoder_of(kind: str) -> tuple[Any, nn.Module]:
    """A small decoder of ``transformers``, and a head."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CONFIG_MAPPING[kind](**sizes, num_key_value_heads=2, vocab_size=64, pad_token_id=0)
    return transformers.AutoModel.from_config(config), nn.Linear(32, 64)


def test_a_perceptron_that_transformers_divides_in_another_way_stays_whole():
    decoder, head = decoder_of("glm4")
    plan = decoder_plan(decoder, head, {decoder: "text", head: "head", decoder.get_input_embeddings(): "embed"}, 2)
    assert plan["text.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["text.layers.*"] == "divided_tokens"  # of which each rank computes the perceptron for its share
    assert not any(".mlp" in name for name in plan)


def test_a_decoder_whose_attention_no_plan_divides_is_refused():
    decoder, head = decoder_of("phi3")
    with pytest.raises(ValueError, match=r"has a plan by which tensor ranks share the attention of Phi3Model\. Divide"):
        decoder_plan(decoder, head, {decoder: "text", head: "head"}, 2)


@pytest.mark.parametrize(
    ("layers", "divided"),
    [
        ({"fc1": nn.Linear(8, 32), "fc2": nn.Linear(32, 8)}, True),
        ({"fc1": nn.Linear(8, 64), "fc2": nn.Linear(32, 8)}, False),  # two halves, one of which gates the other
        ({"fc1": nn.Linear(8, 32), "norm": nn.LayerNorm(32), "fc2": nn.Linear(32, 8)}, False),
    ],
)
def test_perceptrons_of_towers_are_divided_where_nothing_between_needs_them_whole(layers, divided):
    plan = perceptron_plan({"tower": nn.ModuleDict({"mlp": nn.ModuleDict(layers)})}, 2)
    assert plan == ({"tower.mlp.fc1": "colwise", "tower.mlp.fc2": "rowwise"} if divided else {})
