"""What lies in host memory in place of the device: bit for bit as on the device, and what travels is counted."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from flowtrain_lightning.parallel.deepspeed.deepspeed_half import DeepSpeedHalf
from flowtrain_lightning.parallel.deepspeed.deepspeed_shards import DeepSpeedShardedHalf
from flowtrain_lightning.parallel.offloading import ActivationsOnHost, SteppedOnHost
from flowtrain_lightning.parallel.replicate import ReplicatedHalf
from tests.forks import Job, read_down, run_jobs, write_down

STEPS = 3


def compare(folder: Path) -> None:
    """Trains by each stage of ZeRO, with the optimizer's states on the device and on the host."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {}
    for stage in (1, 2, 3):
        (kept, _), (offloaded, seen) = _train(stage, on_host=False), _train(stage, on_host=True)
        found[str(stage)] = {**seen, "same": all(map(torch.equal, kept, offloaded))}
    write_down(folder, found)
    dist.destroy_process_group()


def _train(stage: Any, *, on_host: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """What the optimizer has made of this rank's part of the weights, and what left and returned."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 5))
    weights = list(module.parameters())
    elements = sum(weight.numel() for weight in weights)
    settings: dict[str, Any] = {"group": None, "device": torch.device("cpu"), "optimizer_on_host": on_host}
    half: DeepSpeedHalf
    if stage == 3:
        half = DeepSpeedShardedHalf({"half": module}, fill=lambda keep: None, **settings)
    else:
        half = DeepSpeedHalf({"half": module}, stage=stage, **settings)
    shares = half.take_optimizer(optimizer := AdamW(weights, lr=0.1)).values()
    for step in range(STEPS):
        half.begin_step()
        for last in (False, True):
            rows = torch.ones(3, 8) * (1 + step + dist.get_rank())
            loss = half.call(lambda rows=rows: module(rows).square().sum())
            with half.backward(last=last):
                loss.backward()
        half.finish_gradients(0.5)
        optimizer.step()
    stepped = [share.of(share.flat.detach()).clone() for share in shares]  # without what DeepSpeed fills up with
    states = [entry for state in optimizer.state.values() for entry in state.values() if entry.ndim]
    seen: dict[str, Any] = {"elements": elements, "stepped": sum(flat.numel() for flat in half.parameters)}
    seen["states"] = sum(entry.numel() for entry in states)
    if half.on_host is not None:
        seen |= {"left": half.on_host.bytes_left, "returned": half.on_host.bytes_returned}
        half.begin_step()  # takes the weights from where they compute: they are those that were stepped
        seen["back"] = all(torch.equal(share.of(share.flat), one) for share, one in zip(shares, stepped, strict=True))
    half.release()
    return stepped, seen


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


def test_casts_of_weights_stay_and_what_an_embedding_gives_leaves():
    embed, head = nn.Embedding(5, 16), nn.Linear(16, 4)
    activations = ActivationsOnHost(pinned=False)
    half = ReplicatedHalf([*embed.parameters(), *head.parameters()], activations=activations)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half.call(lambda tokens: head(embed(tokens).tanh()), torch.arange(3)).sum().backward()
    # The tokens, what tanh gives in float32, and its cast, which the product takes.
    assert activations.bytes_left == activations.bytes_returned == 3 * 8 + 3 * 16 * 4 + 3 * 16 * 2
    embedded, weights = ActivationsOnHost(pinned=False), embed.weight.detach()
    half = ReplicatedHalf([*embed.parameters(), *head.parameters()], activations=embedded)
    half.call(lambda tokens: embed(tokens).square(), torch.arange(3)).sum().backward()
    assert embedded.bytes_left == 3 * 8 + weights[:3].nbytes


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


def test_an_optimizer_steps_copies_and_the_weights_follow():
    weights, expected = ([torch.full((5,), 2.0), torch.arange(3.0)] for _ in range(2))
    on_host = SteppedOnHost(weights, pinned=False)
    on_host.take_weights()
    stepped = torch.optim.SGD(on_host.tensors, lr=0.5)
    gradients = on_host.take_gradients([torch.ones(5), torch.ones(3)])
    for kept, gradient in zip(on_host.tensors, gradients, strict=True):
        kept.grad = gradient
    stepped.step()
    assert all(map(torch.equal, weights, expected))
    on_host.return_weights()
    assert all(torch.equal(one, other - 0.5) for one, other in zip(weights, expected, strict=True))
    assert (on_host.bytes_left, on_host.bytes_returned) == (2 * 8 * 4, 8 * 4)


@pytest.mark.full
def test_by_deepspeed_states_in_host_memory_change_no_bit_and_a_share_travels(tmp_path):
    pytest.importorskip("deepspeed")
    job = Job("compare", f"{__name__}:compare", 2, imports="deepspeed")
    done = run_jobs(tmp_path, [job])["compare"].check()
    for found in read_down(done.folder):
        for by_stage in found.values():
            assert by_stage["same"]
            assert by_stage["back"]
            assert by_stage["stepped"] == pytest.approx(by_stage["elements"] / 2, rel=0.02)  # DeepSpeed fills up
            assert by_stage["states"] == 2 * by_stage["stepped"]
            step = 4 * by_stage["stepped"]
            assert by_stage["left"] == 2 * STEPS * step  # weights and gradients
            assert by_stage["returned"] == STEPS * step
