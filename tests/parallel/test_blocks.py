"""Recomputing in the backward: what a block computes again, and that its gradients stay what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flowtrain_lightning.parallel.blocks import recompute_in_backward
from tests.parallel.sharding import Layer


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


def test_without_gradients_nothing_is_kept_for_a_backward():
    block = Layer()
    recompute_in_backward(block, "full")
    with torch.no_grad():
        assert not block(torch.ones(2, 8)).requires_grad
