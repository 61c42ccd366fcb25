"""Repeated blocks: what is computed again in a backward, and that compiled ones compute what they computed before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flowtrain_lightning.attention import varlen_attention
from flowtrain_lightning.parallel.blocks import compile_blocks, recompute_in_backward
from tests.exactness.mixture import MixtureBlock
from tests.parallel.sharding import Layer
from tests.tiny import WIDTH


def run(recompute: str) -> tuple[list[Tensor | None], int, int]:
    """Gradients of a layer and its input, and the operations of products in forward and backward."""
    torch.manual_seed(0)
    block, x = Layer(), torch.randn(64, 8, requires_grad=True)
    names = [name for name, _ in block.named_parameters()]
    recompute_in_backward(block, recompute)
    with FlopCounterMode(display=False) as forward:
        loss = block(x).square().sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert [name for name, _ in block.named_parameters()] == names
    flops = forward.get_total_flops(), backward.get_total_flops()
    return [x.grad, *(parameter.grad for parameter in block.parameters())], *flops


@pytest.mark.parametrize(("recompute", "again"), [("none", False), ("selective", False), ("full", True)])
def test_products_of_matrices_are_computed_again_only_where_all_is(recompute, again):
    gradients, forward, backward = run(recompute)
    expected, *_ = run("none")
    assert all(one.equal(other) for one, other in zip(gradients, expected, strict=True))
    assert (backward > 2 * forward) == again


def gradients_of_a_mixture(recompute: str) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a layer whose router chooses others when it is asked again, and what its experts were chosen by."""
    torch.manual_seed(0)
    block, chosen = MixtureBlock(WIDTH, alike=False), []
    block.experts.register_forward_pre_hook(lambda _, given: chosen.append(given[1].clone()))
    recompute_in_backward(block, recompute)
    rows = torch.randn(9, WIDTH, requires_grad=True)
    block(rows, torch.tensor([0, 4, 9], dtype=torch.int32), 5, True).square().sum().backward()
    return [rows.grad, *(parameter.grad for parameter in block.parameters())], chosen


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_router_that_would_choose_otherwise_when_it_is_computed_again_does_not(recompute):
    gradients, (first, again) = gradients_of_a_mixture(recompute)
    expected, (alone,) = gradients_of_a_mixture("none")
    assert again.equal(first)
    assert first.equal(alone)
    assert all(one.equal(other) for one, other in zip(gradients, expected, strict=True))


class SharesInPlace(MixtureBlock):
    """Divides what it has found by its sum in place, as routers of Hugging Face do."""

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        shares /= shares.sum(dim=-1, keepdim=True)
        return x + self.experts(x, chosen, shares)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_is_done_in_place_to_what_a_router_found_is_done_again(recompute):
    blocks = []
    for each in ("none", recompute):
        torch.manual_seed(0)
        block = SharesInPlace(WIDTH, alike=False)
        recompute_in_backward(block, each)
        for _ in range(2):
            block(torch.randn(9, WIDTH)).square().sum().backward()
        blocks.append(block)
    one, other = ([p.grad for p in block.parameters() if p.grad is not None] for block in blocks)
    assert len(one) == 5
    assert all(a.equal(b) for a, b in zip(one, other, strict=True))


class Calls(TorchDispatchMode):
    """Counts how often operations of a name run, and are not taken from what was kept."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() == self.name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_packed_attention_of_a_gpu_is_computed_again_only_where_all_is(recompute, times):
    class Attending(nn.Module):
        def forward(self, heads: Tensor) -> Tensor:
            return varlen_attention(heads * 2, heads, heads, bounds, 5, causal=True).exp()

    # On the meta device PyTorch's kernel gives shapes.
    heads = torch.empty(8, 4, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    bounds = torch.empty(3, device="meta", dtype=torch.int32)
    block = Attending()
    recompute_in_backward(block, recompute)
    with Calls("torch_attn::_varlen_attn") as calls:
        block(heads).sum().backward()
    assert calls.count == times


def test_without_gradients_nothing_is_kept_for_a_backward():
    block = Layer()
    recompute_in_backward(block, "full")
    with torch.no_grad():
        assert not block(torch.ones(2, 8)).requires_grad


def test_a_copy_of_a_block_computes_with_weights_of_its_own():
    block = Layer()
    recompute_in_backward(block, "full")
    copied = copy.deepcopy(block)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
    rows = torch.ones(2, 8)
    copied(rows).sum().backward()
    assert all(weight.grad is None for weight in block.parameters())
    assert copied(rows).equal(rows)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.inner(self.norm(hidden)).relu()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_layers_of_a_kind_share_one_compilation_for_all_numbers_of_tokens():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, counter = Stack(), CompileCounter()
    names, sizes = list(model.state_dict()), (5, 17, 3, 64, 129, 31)
    expected = [model(torch.ones(size, 8)) for size in sizes]
    compile_blocks(model, backend=counter)
    found = [model(torch.ones(size, 8)) for size in sizes[:1]]
    after_warm_up = counter.frame_count
    found += [model(torch.ones(size, 8)) for size in sizes[1:]]
    assert after_warm_up == 2, "one for the first layer, whose input needs no gradient, and one for all others"
    assert counter.frame_count == after_warm_up
    assert list(model.state_dict()) == names
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
