"""Saved activations lie in host memory between forward and backward; weights stay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flowtrain_lightning.parallel.offloading import ActivationsOnHost
from flowtrain_lightning.parallel.replicate import ReplicatedHalf


def gradients(model: nn.Module, activations: ActivationsOnHost | None) -> list[torch.Tensor]:
    model.zero_grad()
    half = ReplicatedHalf(list(model.parameters()), activations=activations)
    half.begin_step()
    torch.manual_seed(0)
    loss = half.call(model, torch.randn(3, 8)).square().sum()
    with half.backward(last=True):
        loss.backward()
    half.finish_gradients(1.0)
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_what_leaves_returns_and_no_gradient_changes():
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    activations = ActivationsOnHost(pinned=False)
    kept, offloaded = gradients(model, None), gradients(model, activations)
    assert all(torch.equal(one, other) for one, other in zip(kept, offloaded, strict=True))
    # The input, and what tanh gives: saved for itself and for the layer behind it. No weight is among them.
    assert activations.bytes_left == activations.bytes_returned == 4 * 3 * (8 + 32 + 32)


def test_frozen_weights_stay_too():
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    model[2].requires_grad_(False)
    activations = ActivationsOnHost(pinned=False)
    half = ReplicatedHalf(list(model.parameters()), activations=activations)
    half.call(model, torch.ones(3, 8)).sum().backward()
    assert activations.bytes_left == activations.bytes_returned == 4 * 3 * (8 + 32)


def test_nobody_waits_for_copies_to_or_from_pinned_memory(monkeypatch):
    goes_on = []

    def noting(function):
        def noted(*args, non_blocking=False, **options):
            goes_on.append(non_blocking)
            return function(*args, **options)

        return noted

    empty = torch.empty  # of memory that a CPU cannot pin
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options))
    monkeypatch.setattr(Tensor, "copy_", noting(Tensor.copy_))
    monkeypatch.setattr(Tensor, "to", noting(Tensor.to))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    half = ReplicatedHalf(list(model.parameters()), activations=ActivationsOnHost(pinned=True))
    half.call(model, torch.ones(3, 8)).sum().backward()
    assert goes_on == [True] * 6
