"""Halves that DeepSpeed optimizes: what a rank holds of gradients and states, and what is refused."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from flowtrain_lightning.parallel.deepspeed.deepspeed_half import DeepSpeedHalf
from tests.forks import Job, read_down, run_jobs, write_down


def shares(folder: Path) -> None:
    """Trains by ZeRO-1 and ZeRO-2, and notes what a rank holds and what is said of mistakes."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    write_down(folder, {str(stage): _train(stage) for stage in (1, 2)})
    dist.destroy_process_group()


def _train(stage: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module = _half()
    weights = list(module.parameters())
    half = DeepSpeedHalf({"half": module}, None, torch.device("cpu"), stage=stage)
    said = [_said(lambda: half.take_optimizer(AdamW(nn.Linear(1, 1).parameters())))]
    half.take_optimizer(AdamW([weight for weight in weights[1:] if weight is not module.never.weight]))
    half.begin_step()
    said.append(_said(lambda: (_backward(half, module), half.finish_gradients(1.0))))
    module.zero_grad(set_to_none=True)
    hook = weights[0].register_post_accumulate_grad_hook(lambda _: None)
    said.append(_said(lambda: half.take_optimizer(AdamW(weights))))
    hook.remove()
    weights = [weight for weight in weights if weight is not module.never.weight]  # which the optimizer may lack
    optimizer = AdamW(weights, lr=0.1)
    half.take_optimizer(optimizer)
    places = {weight.untyped_storage().data_ptr() for weight in weights}
    in_place = all(flat.untyped_storage().data_ptr() in places for flat in half.parameters)

    half.begin_step()
    if dist.get_rank() == 0:  # no other rank comes to its sum
        said.append(_said(lambda: _backward(half, module, fails=True)))
    module.zero_grad(set_to_none=True)
    half.begin_step()
    before = [weight.detach().clone() for weight in weights]
    kept = 0
    for last in (False, True):
        _backward(half, module, last=last)
        kept = sum(weight.grad.numel() for weight in weights if weight.grad is not None)
    half.finish_gradients(0.5)
    norm = float(half.squared_norm([flat.grad for flat in half.parameters if flat.grad is not None])) ** 0.5
    optimizer.step()
    moved = sum(not one.equal(other) for one, other in zip(before, weights, strict=True))
    states = sum(entry.numel() for state in optimizer.state.values() for entry in state.values() if entry.ndim)

    half.begin_step()
    half.finish_gradients(1.0)  # of a step that used nothing
    before = [weight.detach().clone() for weight in weights]
    optimizer.step()
    rested = all(one.equal(other) for one, other in zip(before, weights, strict=True))

    weights[0].requires_grad_(False)
    said.append(_said(half.begin_step))
    half.release()
    return {
        "weights": sum(weight.numel() for weight in weights),
        "kept": kept,
        "states": states,
        "moved": moved,
        "rested": rested,
        "in_place": in_place,
        "norm": norm,
        "expected": _norm_alone(),
        "said": said,
    }


class _Half(nn.Sequential):
    """Has a weight that it never uses."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 5))
        self.never = nn.Linear(3, 3, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self[2](self[1](self[0](rows)))


def _half() -> _Half:
    return _Half()


def _backward(half: DeepSpeedHalf, module: nn.Module, *, last: bool = True, fails: bool = False) -> None:
    rows = torch.ones(3, 8) * (1 + dist.get_rank())
    loss = half.call(lambda: module(rows).square().sum())
    with half.backward(last=last):
        loss.backward()
        if fails:
            raise ArithmeticError("the backward fails")


def _norm_alone() -> float:
    """Of half the gradient of the four backwards of two ranks."""
    torch.manual_seed(0)
    module = _half()
    for rank in range(2):
        for _ in range(2):
            module(torch.ones(3, 8) * (1 + rank)).square().sum().backward()
    return (
        float(torch.cat([weight.grad.flatten() for weight in module.parameters() if weight.grad is not None]).norm())
        / 2
    )


def _said(function: Any) -> str:
    try:
        function()
    except (ArithmeticError, ValueError) as error:
        return str(error)
    return ""


def test_where_deepspeed_is_missing_an_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'flowtrain-lightning\[deepspeed\]"):
        DeepSpeedHalf({"half": nn.Linear(2, 2)}, None, torch.device("cpu"), stage=1)


def test_ranks_share_states_and_by_zero_2_gradients_and_hear_of_mistakes(tmp_path):
    pytest.importorskip("deepspeed")
    done = run_jobs(tmp_path, [Job("shares", f"{__name__}:shares", 2, imports="deepspeed")])["shares"].check()
    for rank, found in enumerate(read_down(done.folder)):
        for stage, by_stage in found.items():
            assert by_stage["states"] == pytest.approx(by_stage["weights"], rel=0.01)  # two for each weight of a half
            assert by_stage["kept"] == (by_stage["weights"] if stage == "1" else 0)
            assert by_stage["norm"] == pytest.approx(by_stage["expected"], rel=1e-5)
            assert by_stage["moved"] > 0
            assert by_stage["rested"]
            assert by_stage["in_place"]  # no second copy of the weights is kept
            said = by_stage["said"]
            assert said[0].startswith(
                "5 weights of a half in DeepSpeed's layout want a gradient, but the optimizer has"
            )
            assert said[1].startswith("The weight 'half.0.weight' got a gradient, but the optimizer does not have it")
            assert said[2].startswith("A hook was registered with `register_post_accumulate_grad_hook`")
            assert rank == 1 or said[3] == "the backward fails"
            assert "`requires_grad` of a parameter was changed after DeepSpeed took its half" in said[-1]
