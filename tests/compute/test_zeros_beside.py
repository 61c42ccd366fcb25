"""Zeros that go back beside gradients: what they alone reach has no gradient."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flowtrain_lightning.compute.zeros_beside import leaving_none


def backward(read, unread):
    with leaving_none([unread], [read]):
        torch.autograd.backward([read, unread], [torch.ones_like(read), torch.zeros_like(unread)])


def heads():
    trunk, read, unread = (nn.Linear(3, 3) for _ in range(3))
    rows = checkpoint(trunk, torch.ones(2, 3), use_reentrant=False)
    return trunk, (read, read(rows)), (unread, unread(rows))


def test_weights_that_only_zeros_reach_have_no_gradient():
    trunk, (read, made), (unread, zeroed) = heads()
    backward(made, zeroed)
    assert trunk.weight.grad is not None
    assert read.weight.grad is not None
    assert unread.weight.grad is None
    assert unread.bias.grad is None


def test_what_sums_in_the_backward_is_told_of_no_gradient():
    _, (_, made), (unread, zeroed) = heads()
    with leaving_none([zeroed], [made]):
        told = []
        unread.weight.register_post_accumulate_grad_hook(lambda weight: told.append(weight.grad))
        torch.autograd.backward([made, zeroed], [torch.ones_like(made), torch.zeros_like(zeroed)])
    assert told == [None]


def test_a_gradient_of_another_microbatch_stays():
    _, (_, made), (unread, zeroed) = heads()
    unread(torch.ones(2, 3)).sum().backward()
    before = unread.weight.grad.clone()
    backward(made, zeroed)
    assert torch.equal(unread.weight.grad, before)


def test_without_zeros_nothing_is_changed():
    _, (read, made), _ = heads()
    with leaving_none([], [made]):
        made.sum().backward()
    assert read.weight.grad is not None
