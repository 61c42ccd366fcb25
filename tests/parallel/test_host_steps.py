"""Optimizers that step in host memory: bit for bit as on the device, and what travels is counted."""

from __future__ import annotations

import pytest
import torch

from flowtrain_lightning.parallel.host_steps import SteppedOnHost
from tests.forks import Job, read_down, run_jobs
from tests.parallel.offloaded import STEPS


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


def test_by_deepspeed_states_in_host_memory_change_no_bit_and_a_share_travels(tmp_path):
    pytest.importorskip("deepspeed")
    done = run_jobs(tmp_path, [Job("compare", "tests.parallel.offloaded:compare", 2)])["compare"].check()
    for found in read_down(done.folder):
        for by_stage in found.values():
            assert by_stage["same"]
            assert by_stage["back"]
            assert by_stage["stepped"] == pytest.approx(by_stage["elements"] / 2, rel=0.02)  # DeepSpeed fills up
            assert by_stage["states"] == 2 * by_stage["stepped"]
            step = 4 * by_stage["stepped"]
            assert by_stage["left"] == 2 * STEPS * step  # weights and gradients
            assert by_stage["returned"] == STEPS * step
