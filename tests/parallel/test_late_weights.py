"""Gradients of weights that a backward leaves for later are those that it would have made, with all hooks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowtrain_lightning.parallel.stages.late_weights import LateWeights


class Layers(nn.Module):
    """Two uses of one weight, a norm and a layer without bias, that may be computed again."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.last = nn.Linear(4, 3, bias=False)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.twice, x, use_reentrant=False) if self.again else self.twice(x)
        return self.last(self.norm(x)).square().sum()

    def twice(self, x: Tensor) -> Tensor:
        return self.first(self.first(x).tanh()[None])[0].tanh()


def rows() -> Tensor:
    return torch.linspace(-1, 1, 20).view(5, 4).double().requires_grad_()


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_they_are_those_of_a_whole_backward(again):
    whole, parts, given, taken = Layers().double(), Layers(again).double(), rows(), rows()
    whole(given).backward()
    (late := LateWeights()).attach(parts)
    with late.for_later():
        loss = parts(taken)
    with late.left_in(left := []):
        loss.backward()
    assert torch.equal(taken.grad, given.grad), "they wait for no weight"
    assert parts.norm.weight.grad is not None
    assert parts.first.weight.grad is parts.last.weight.grad is None
    assert len(left) == 3
    late.finish(left)
    assert not left
    for found, wanted in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-12)


def test_a_forward_of_which_nothing_is_left_is_as_before():
    whole, parts = Layers().double(), Layers().double()
    whole(rows()).backward()
    LateWeights().attach(parts)
    parts(rows()).backward()
    for found, wanted in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-12)


def test_hooks_of_a_weight_see_its_gradient_once():
    layers, seen = Layers(), []
    layers.first.weight.register_hook(lambda gradient: seen.append("made"))
    layers.first.weight.register_post_accumulate_grad_hook(lambda weight: seen.append("accumulated"))
    (late := LateWeights()).attach(layers)
    with late.for_later():
        loss = layers(rows().float())
    with late.left_in(left := []):
        loss.backward()
    assert not seen
    late.finish(left)
    assert seen.count("accumulated") == 1


def test_weights_that_are_frozen_leave_nothing():
    layers = Layers()
    layers.last.requires_grad_(False)
    (late := LateWeights()).attach(layers)
    with late.for_later():
        loss = layers(rows().float())
    with late.left_in(left := []):
        loss.backward()
    assert {id(each.weight) for each in left} == {id(layers.first.weight)}


def test_autocast_computes_in_its_type_and_gradients_have_that_of_the_weight():
    whole, parts = Layers(), Layers()
    (late := LateWeights()).attach(parts)
    losses = []
    for layers in (whole, parts):
        with torch.autocast("cpu", dtype=torch.bfloat16), late.for_later():
            losses.append(layers(rows().float()))
    losses[0].backward()
    with late.left_in(left := []):
        losses[1].backward()
    assert {each.inputs.dtype for each in left} == {torch.bfloat16}
    late.finish(left)
    for found, wanted in zip(parts.parameters(), whole.parameters(), strict=True):
        assert found.grad.dtype == torch.float32
        torch.testing.assert_close(found.grad, wanted.grad, rtol=0.05, atol=0.05)


def test_a_layer_of_which_no_input_wants_a_gradient_makes_its_own_at_once():
    layers = Layers()
    (late := LateWeights()).attach(layers)
    with late.for_later():
        loss = layers.last(rows().float().detach()).sum()
    with late.left_in(left := []):
        loss.backward()
    assert not left
    assert layers.last.weight.grad is not None
