"""Operations of a layer are those that live layers of Hugging Face start, counted on the meta device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionBlock

from benchmarks.kernel_count import CountKernels
from flowtrain_lightning.allocator.division import Division
from flowtrain_lightning.allocator.module_parts import Layers, MixtureOfExperts
from flowtrain_lightning.allocator.operations import moved_bytes, operations
from flowtrain_lightning.parallel.experts.experts import ExpertExchange, compute_chosen, mark_experts, set_exchange

WIDTH, INNER, HEADS, TOKENS = 64, 160, 4, 96
META = torch.device("meta")


def numbers(*shape):
    return torch.empty(*shape, device=META, dtype=torch.bfloat16, requires_grad=True)


def counted(run, causal):
    """Operations of a forward and of its backward; attention is one, not those that stand for it here."""
    heads = [numbers(1, HEADS, TOKENS, WIDTH // HEADS) for _ in range(3)]
    there, back = started(run)
    attention = started(lambda: scaled_dot_product_attention(*heads, is_causal=causal))
    return there - attention[0] + 1, back - attention[1] + 1


def started(run):
    """Operations of a forward and of its backward, but for copies that only products on the meta device need."""
    with CountKernels() as forward:
        result = run()
    result = result[0] if isinstance(result, tuple) else result
    with CountKernels() as backward:
        result.backward(torch.empty_like(result))
    return tuple(each.count.total() - each.count["clone"] for each in (forward, backward))


def decoder(kind, **settings):
    """A decoder's layer on packed tokens."""
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH // HEADS,
        "vocab_size": 512,
    }
    with META:
        model = transformers.AutoModel.from_config(
            transformers.CONFIG_MAPPING[kind](**text, **settings), dtype=torch.bfloat16
        )
    hidden, rotation = numbers(1, TOKENS, WIDTH), torch.empty(1, TOKENS, WIDTH // HEADS, device=META).bfloat16()
    return lambda: model.layers[0](hidden, attention_mask=None, position_embeddings=(rotation, rotation))


def tower(kind):
    """A tower's layer on the patches of a picture."""
    if kind == "siglip":
        config = transformers.SiglipVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            image_size=56,
            patch_size=14,
        )
        with META:
            tower = transformers.SiglipVisionModel(config).bfloat16()
            layer = getattr(tower, "vision_model", tower).encoder.layers[0]
        hidden = numbers(1, TOKENS, WIDTH)
        return lambda: layer(hidden, attention_mask=None)
    made = {"qwen2_vl": Qwen2VLVisionBlock, "qwen2_5_vl": Qwen2_5_VLVisionBlock}[kind]
    config = SimpleNamespace(
        hidden_size=WIDTH,
        embed_dim=WIDTH,
        mlp_ratio=2.5,
        intermediate_size=INNER,
        num_heads=HEADS,
        hidden_act={"qwen2_vl": "quick_gelu", "qwen2_5_vl": "silu"}[kind],
        _attn_implementation="sdpa",
    )
    with META:
        layer = made(config, "sdpa").bfloat16()
    hidden, angles = numbers(TOKENS, WIDTH), torch.empty(TOKENS, WIDTH // HEADS, device=META)
    ends = torch.tensor([0, TOKENS])
    return lambda: layer(hidden, cu_seqlens=ends, position_embeddings=(angles, angles))


def layers(**settings):
    return Layers(1, WIDTH, INNER, HEADS, HEADS, WIDTH // HEADS, **settings)


LLAMA = layers(gated=True, causal=True)
CASES = {
    "llama": (lambda: decoder("llama"), LLAMA),
    "qwen2": (lambda: decoder("qwen2"), LLAMA),
    "siglip": (lambda: tower("siglip"), layers()),
    "qwen2_vl": (lambda: tower("qwen2_vl"), layers(fused=True)),
    "qwen2_5_vl": (lambda: tower("qwen2_5_vl"), layers(fused=True, gated=True)),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_layer_starts_as_many_operations_as_are_counted(kind):
    build, part = CASES[kind]
    forward, backward = counted(build(), part.causal)
    assert operations(part) == pytest.approx(forward, rel=0.15)
    assert 2 * operations(part) == pytest.approx(backward, rel=0.2)


def test_a_mixture_starts_as_many_more_as_choosing_experts_takes():
    experts = layers(gated=True, causal=True, experts=MixtureOfExperts(8, 2, 32))
    mixture = decoder("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    more = counted(mixture, True)[0] - counted(decoder("qwen3"), True)[0]
    assert operations(experts) - operations(LLAMA) == pytest.approx(more, abs=4)


@pytest.mark.parametrize("divided", [False, True])
def test_rows_of_experts_are_copied_as_often_as_is_counted(tmp_path, divided):
    module, count, each, tokens = torch.nn.Module(), 8, 4, 512
    module.weight = torch.nn.Parameter(torch.zeros(count, WIDTH, WIDTH))
    mark_experts(module, count)
    hidden, shares = (torch.rand(tokens, size).bfloat16().requires_grad_() for size in (WIDTH, each))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        if divided:
            set_exchange(module, ExpertExchange(dist.group.WORLD))
        with CountKernels() as forward:
            result = compute_chosen(module, hidden, torch.arange(tokens * each).view(-1, each) % count, shares, clone)
        with CountKernels() as backward:
            result.backward(torch.ones_like(result))
    finally:
        dist.destroy_process_group()
    row, sent = tokens * each * WIDTH * 2, 4 * divided  # what ranks send each other is no copy
    part = layers(gated=True, causal=True, experts=MixtureOfExperts(count, each, 32))
    assert moved(part, divided) == pytest.approx(sum(forward.moved.values()) / row - sent - 2, rel=0.1)
    assert 2 * moved(part, divided) == pytest.approx(sum(backward.moved.values()) / row - sent, rel=0.1)
    if divided:
        more = operations(part, divided=True) - operations(part)
        assert more == pytest.approx(forward.count.total() - 10, abs=2)


def moved(part, divided):
    """Numbers that copies for experts move for each one of a row, at the rate of one operation."""
    width, (some, none) = 2, (part, replace(part, experts=MixtureOfExperts(8, 0, 32)))
    ranks = Division()
    one, other = (moved_bytes(each, width, ranks, eager=True, divided=divided) for each in (some, none))
    activation = 3 * width * part.active_feed_forward
    return (one - other - activation) / (width * part.experts.chosen * part.hidden) * 0.85 / 0.41


def clone(rows, ends):
    """Experts that compute nothing; results are another tensor than rows."""
    return rows.clone()


def test_casts_to_eight_bits_are_one_more_for_each_product():
    assert operations(LLAMA, eight_bits=True) == operations(LLAMA) + 4
