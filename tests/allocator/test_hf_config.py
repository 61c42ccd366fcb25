"""Modules described by Hugging Face configs, held against live models."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.allocator import PlanningError, describe_config
from flowtrain_lightning.allocator.flops import MODEL_BACKWARD, backward_flops, forward_flops

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.allocator.live_models import CONFIGS, build, count, count_backward  # noqa: E402

TOKENS = np.array([150])


def near(value):
    return pytest.approx(value, rel=0.01)


QUICK = ("qwen2_vl", "gemma3", "llava")
OF_FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in sorted(CONFIGS)]


@pytest.fixture(scope="module", params=OF_FAMILIES)
def live(request):
    torch.manual_seed(0)
    return build(request.param)


@pytest.fixture
def described(live):
    return describe_config(live.config)


@pytest.fixture
def encoder(described):
    (half,) = described.encoders.values()
    return half


def test_parameters_are_those_of_the_live_model(live, described, encoder):
    counted = sum(parameter.numel() for parameter in live.model.parameters())
    assert encoder.parameters + described.backbone.parameters == near(counted)


def test_an_encoders_forward_is_what_torch_counts(live, encoder):
    counted, work = count(live.encode), forward_flops(encoder, live.lengths)
    assert (work.dense, work.attention) == (near(counted.dense), near(counted.attention))


def test_an_encoders_backward_is_what_torch_counts(live, encoder):
    counted = count_backward(live.encode)
    work = backward_flops(encoder, live.lengths, attention_factor=MODEL_BACKWARD)
    assert (work.dense, work.attention) == (near(counted.dense), near(counted.attention))


def test_a_backbones_passes_are_what_torch_counts_with_causal_attention_halved(live, described):
    embeddings = torch.nn.Parameter(torch.randn(1, int(TOKENS[0]), 64))
    forward, backward = count(lambda: live.read(embeddings)), count_backward(lambda: live.read(embeddings))
    ours = forward_flops(described.backbone, TOKENS)
    back = backward_flops(described.backbone, TOKENS, attention_factor=MODEL_BACKWARD)
    assert (ours.dense, ours.attention) == (near(forward.dense), near(forward.attention / 2))
    assert (back.dense, back.attention) == (near(backward.dense), near(backward.attention / 2))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "resnet"}, "model_type 'resnet' cannot be read; known are qwen2_vl, qwen2_5_vl, qwen3_vl"),
        ({}, "model_type 'None' cannot be read"),
        ({"model_type": "llava", "text_config": {"model_type": "mistral"}}, "'mistral' has no field"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "'llava' has no field 'vision_config'"),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "num_hidden_layers": "32"}},
            "num_hidden_layers is '32'; it must be a whole number above 0",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": -1}},
            "hidden_size is -1; it must be a whole number above 0",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "num_hidden_layers": 2.5}},
            r"num_hidden_layers is 2\.5; it must be a whole number above 0",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": [64]}},
            r"hidden_size is \[64\]; it must be a whole number above 0",
        ),
        ({"model_type": "llava", "text_config": 5}, "text_config is 5; it must be a part with fields of its own"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_with_what_is_missing(config, words):
    with pytest.raises(PlanningError, match=words):
        describe_config(config)


def test_older_files_with_the_backbones_fields_at_the_top_are_read():
    text = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
    vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "patch_size": 14}
    module = describe_config({"model_type": "qwen2_vl", **text, "vision_config": vision})
    assert module.backbone.parameters == pytest.approx(7.62e9, rel=0.01)
    assert module.encoders["image"].parameters == pytest.approx(0.675e9, rel=0.01)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_a_decoder_of_text_alone_is_described_whatever_it_is_called():
    module = describe_config({**LLAMA, "model_type": "mistral", "quantization_config": {"bits": 4}})
    assert list(module.roles) == ["backbone"]
    assert module.backbone.parameters == pytest.approx(8.03e9, rel=0.001)


@pytest.mark.parametrize("some", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_a_mixture_with_dense_layers_between_is_refused(some):
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    assert describe_config({**LLAMA, **experts}).backbone.layers[0].experts.count == 8
    with pytest.raises(PlanningError, match="has experts in some layers only"):
        describe_config({**LLAMA, **experts, **some})


@pytest.mark.parametrize("kind", ["bert", "glm4_moe", "jamba"])
def test_text_models_of_other_weights_than_llamas_are_refused_whatever_their_fields(kind):
    with pytest.raises(PlanningError, match=f"model_type '{kind}' cannot be read; known are"):
        describe_config({**LLAMA, "model_type": kind})


@pytest.mark.parametrize("other", [{"vision_config": {"depth": 2}}, {"kv_lora_rank": 512}, {"n_routed_experts": 128}])
def test_a_decoder_with_something_unknown_in_it_is_no_decoder_of_text_alone(other):
    with pytest.raises(PlanningError, match="model_type 'mistral' cannot be read; known are"):
        describe_config({**LLAMA, "model_type": "mistral", **other})
