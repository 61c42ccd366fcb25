"""Memory: what a layer keeps, as torch keeps it; and what makes memory grow or shrink."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.allocator.late_bytes import late_bytes, late_bytes_outside
from flowtrain_lightning.allocator.memory_use import activation_bytes, memory_use
from flowtrain_lightning.allocator.module_parts import Dense, Layers
from flowtrain_lightning.allocator.role_problem import Family
from flowtrain_lightning.allocator.workload import LOSS_CHUNK
from tests.allocator.problems import problems

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from flowtrain_lightning.compute.cross_entropy import CHUNK  # noqa: E402
from flowtrain_lightning.parallel.stages.late_weights import LateWeights  # noqa: E402

TOKENS, HIDDEN, INNER, HEADS, KEY_VALUE_HEADS, SIZE = 512, 256, 640, 4, 2, 64


class RootMeanSquare(torch.nn.Module):
    """A norm as the models of Hugging Face compute it."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.float()
        return self.weight.to(x.dtype) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(torch.nn.Module):
    """A layer whose products, attention and activations keep no more than they must."""

    def __init__(self, gated, rotates=False):
        super().__init__()
        linear = torch.nn.Linear
        self.gated, self.rotates = gated, rotates
        kind = RootMeanSquare if gated else partial(torch.nn.LayerNorm, elementwise_affine=False)
        self.norms = torch.nn.ModuleList(kind(HIDDEN) for _ in range(2))
        self.qkv = linear(HIDDEN, (HEADS + 2 * KEY_VALUE_HEADS) * SIZE, False)
        self.leave, self.down = linear(HEADS * SIZE, HIDDEN, False), linear(INNER, HIDDEN, False)
        self.up = linear(HIDDEN, (1 + gated) * INNER, False)

    def forward(self, x):
        normed = self.norms[0](x)
        q, k, v = self.qkv(normed).split([HEADS * SIZE, KEY_VALUE_HEADS * SIZE, KEY_VALUE_HEADS * SIZE], -1)
        q, k, v = (one.unflatten(-1, (-1, SIZE)).transpose(1, 2) for one in (q, k, v))
        if self.rotates:
            q, k = (one * torch.ones(TOKENS, 1) for one in (q, k))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.leave(seen.transpose(1, 2).flatten(2))
        inner = self.up(self.norms[1](x))
        if self.gated:
            gate, up = inner.chunk(2, -1)
            return x + self.down(functional.silu(gate) * up)
        return x + self.down(functional.gelu(inner))


def kept_bytes(layer, x):
    """Bytes of what autograd keeps, without parameters."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(x)
    assert output.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_a_layer_keeps_what_torch_keeps(gated, dtype):
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True, dtype=dtype)
    part = Layers(1, HIDDEN, INNER, HEADS, KEY_VALUE_HEADS, SIZE, gated=gated, causal=True)
    kept = kept_bytes(Layer(gated).to(dtype), x)
    assert TOKENS * activation_bytes(part, dtype.itemsize, "none") == pytest.approx(kept, rel=0.03)


def test_a_fused_query_key_value_product_is_kept_whole_beside_the_rotated_parts():
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    part = Layers(1, HIDDEN, INNER, HEADS, KEY_VALUE_HEADS, SIZE, causal=True, fused=True)
    kept = kept_bytes(Layer(False, rotates=True), x)
    assert TOKENS * activation_bytes(part, 4, "none") == pytest.approx(kept, rel=0.03)


def test_a_frozen_layer_that_passes_gradients_on_keeps_no_inputs_of_products():
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    part = Layers(1, HIDDEN, INNER, HEADS, KEY_VALUE_HEADS, SIZE, causal=True)
    layer = Layer(False).requires_grad_(False)
    expected = activation_bytes(part, 4, "none", keeps=False)
    assert TOKENS * expected == pytest.approx(kept_bytes(layer, x), rel=0.03)


def left_bytes(module, x):
    """Bytes of what the first part of a backward leaves for the second one."""
    late, left = LateWeights(), []
    late.attach(module)
    with late.for_later():
        output = module(x)
    with late.left_in(left):
        output.sum().backward()
    storages = {one.untyped_storage().data_ptr(): one for each in left for one in (each.inputs, each.gradients)}
    return sum(one.numel() * one.element_size() for one in storages.values())


@pytest.mark.parametrize("gated", [True, False])
def test_between_both_parts_of_a_backward_a_layer_keeps_what_is_left_of_it(gated):
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    part = Layers(1, HIDDEN, INNER, HEADS, KEY_VALUE_HEADS, SIZE, gated=gated, causal=True, fused=True)
    assert TOKENS * late_bytes(part, 4) == left_bytes(Layer(gated), x)


@pytest.mark.parametrize("outputs", [HIDDEN, 4000], ids=["a projector", "a head"])
def test_so_does_a_product_outside_of_layers_but_no_head(outputs):
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    product = torch.nn.Sequential(torch.nn.Linear(HIDDEN, outputs, False), torch.nn.Tanh())
    kept = TOKENS * late_bytes_outside(Dense(HIDDEN, outputs), 4)
    assert kept == left_bytes(product, x)
    assert (kept == 0) == (outputs == 4000)


def test_stages_that_split_backwards_keep_more_where_little_is_kept_for_whole_ones(backbone):
    for recompute in ("none", "full"):
        whole, split, in_a_v = (
            use(backbone, pipeline=4, recompute=recompute, schedule=schedule)["activations"]
            for schedule in ("1f1b", "zb-h1", "zb-v")
        )
        assert whole <= split <= in_a_v
        assert recompute == "none" or split > 1.2 * whole


def use(problem, tokens=4096.0, microbatches=8.0, **degrees):
    family = Family(np.array([degrees.pop("data", 4.0)]), **degrees)
    return memory_use(problem, family, np.array([tokens]), np.array([microbatches])).at(0)


def total(problem, tokens=4096.0, microbatches=8.0, **degrees):
    return sum(use(problem, tokens, microbatches, **degrees).values())


@pytest.fixture(scope="module")
def backbone():
    return problems()["backbone"]


SHARDS = ("replicate", "zero1", "zero2", "fsdp")


@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4, 7]),
    context=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    tokens=st.floats(100, 30000),
)
def test_memory_falls_with_every_degree_and_grows_with_tokens(backbone, tensor, pipeline, context, recompute, tokens):
    shape = {"tensor": tensor, "pipeline": pipeline, "context": context, "recompute": recompute}
    here = total(backbone, tokens, **shape)
    assert total(backbone, tokens, **{**shape, "tensor": 2 * tensor}) < here
    assert total(backbone, tokens, **{**shape, "context": 2 * context}) < here
    assert total(backbone, tokens * 1.1, **shape) > here
    assert total(backbone, tokens, **{**shape, "pipeline": 4 * pipeline}) < here


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "bf16-master"])
def test_the_more_is_sharded_the_less_is_kept(precision):
    problem = problems(precision=precision)["backbone"]
    sizes = [total(problem, data=8.0, shard=shard) for shard in SHARDS]
    assert sizes == sorted(sizes, reverse=True)


def test_what_is_computed_again_is_not_kept(backbone):
    sizes = [total(backbone, recompute=recompute) for recompute in ("none", "selective", "full")]
    assert sizes == sorted(sizes, reverse=True)


def test_a_replicated_backbone_takes_eighteen_bytes_a_parameter_in_bf16_mixed(backbone):
    use = memory_use(backbone, Family(np.array([8.0])), np.array([1.0]), np.array([1.0]))
    assert (use.weights + use.gradients + use.states)[0] == pytest.approx(18 * backbone.half.parameters)


def test_a_frozen_half_keeps_neither_gradients_nor_states_nor_activations():
    encoder = problems(frozen=("encoder",))["encoder"]
    use = memory_use(encoder, Family(np.array([1.0])), np.array([1e4]), np.array([4.0])).at(0)
    training = memory_use(problems()["encoder"], Family(np.array([1.0])), np.array([1e4]), np.array([4.0])).at(0)
    assert use["gradients"] == use["states"] == 0
    assert use["activations"] < training["activations"] / 50


def test_logits_are_a_large_part_of_a_small_model():
    problem = problems("qwen2-vl-2b", loss_chunk=8192)["backbone"]
    use = memory_use(problem, Family(np.array([1.0])), np.array([8192.0]), np.array([1.0])).at(0)
    assert 0.95 * 12 * 8192 * 151936 < use["logits"] <= 12 * 8192 * 151936
    assert use["logits"] > use["weights"]


def test_logits_take_the_place_of_what_a_layer_works_with():
    problem = problems("qwen2.5-vl-7b", loss_chunk=16)["backbone"]
    assert memory_use(problem, Family(np.ones(1)), np.array([8192.0]), np.ones(1)).at(0)["logits"] == 0


def test_the_loss_is_in_chunks_by_default_as_in_the_models_of_hugging_face():
    assert LOSS_CHUNK == CHUNK


def test_mergers_of_several_levels_are_gathered_one_by_one_as_layers_are():
    """An engine of FSDP2 was counted to gather 0.41 GB of this tower at most (`benchmarks.projected`)."""
    encoder, one = problems("qwen3-vl-8b")["encoder"], np.array([1.0])
    use = memory_use(encoder, Family(np.array([8.0]), shard="fsdp"), one, one)
    shares = encoder.half.parameters / 8
    assert use.weights[0] + use.gradients[0] - 8 * shares == pytest.approx(0.41e9, rel=0.02)


def test_roles_on_one_device_share_its_overhead(backbone):
    family, one = Family(np.array([2.0])), np.array([1.0])
    alone = memory_use(backbone, family, one, one)
    device = backbone.cluster.device
    smaller = replace(backbone, cluster=replace(backbone.cluster, device=replace(device, overhead=1.0)))
    assert alone.overhead[0] == device.overhead
    assert alone.total[0] - memory_use(smaller, family, one, one).total[0] == pytest.approx(device.overhead - 1)
