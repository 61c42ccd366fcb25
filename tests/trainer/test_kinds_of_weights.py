"""DTensors of several meshes and plain weights in one parameter group are stepped by PyTorch's fast kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from flowtrain_lightning.trainer.kinds_of_weights import stepping_by_kind
from tests.exactness.train import whole
from tests.forks import Job, read_down, run_jobs, write_down

Groups = Iterable[dict[str, Any]]

OPTIMIZERS: dict[str, Callable[[Groups], Optimizer]] = {
    "AdamW foreach": lambda groups: AdamW(groups, foreach=True, amsgrad=True),
    "AdamW fused": lambda groups: AdamW(groups, fused=True),
    "Adam foreach": lambda groups: Adam(groups, foreach=True),
    "SGD foreach": lambda groups: SGD(groups, lr=0.1, momentum=0.9, foreach=True),
}
STEPS = 3


def weights(*, divided: bool) -> list[nn.Parameter]:
    """Six: where they are divided, two over a mesh of one dimension, two over one of two, and two not at all."""
    torch.manual_seed(0)
    made = [torch.randn(4, 4) for _ in range(6)]
    if not divided:
        return [nn.Parameter(each) for each in made]
    line = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    plane = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replica", "tensor"))
    on_line = [distribute_tensor(each, line, [Shard(0)]) for each in made[:2]]
    on_plane = [distribute_tensor(each, plane, [Shard(0), Shard(1)]) for each in made[2:4]]
    return [nn.Parameter(each) for each in (*on_line, *on_plane, *made[4:])]


def groups_of(given: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Three groups: of several kinds, of one kind, of none."""
    return [
        {"params": [*given[:1], *given[2:5]], "weight_decay": 0.1},
        {"params": [*given[5:], *given[1:2]], "lr": 0.01},
        {"params": []},
    ]


def train(given: list[nn.Parameter], optimizer: Optimizer, seen: list[int]) -> None:
    """Some steps, with a schedule, whose closures halve a learning rate."""
    scheduler = StepLR(optimizer, 1, 0.5)

    def closure() -> None:
        seen.append(len(optimizer.param_groups))
        optimizer.param_groups[0]["lr"] /= 2
        for number, weight in enumerate(given):
            weight.grad = weight.detach() * (number + 1)

    for _ in range(STEPS):
        with stepping_by_kind(optimizer):
            optimizer.step(closure=closure)  # type: ignore[call-overload]
        scheduler.step()


def step_all_kinds(folder: Path) -> None:
    """For each optimizer: the largest difference to plain weights, groups that closures saw, rates and saved groups."""
    dist.init_process_group("gloo")
    told = {}
    for name, make in OPTIMIZERS.items():
        plain, mixed, seen = weights(divided=False), weights(divided=True), []
        of_plain, of_mixed = make(groups_of(plain)), make(groups_of(mixed))
        train(plain, of_plain, [])
        train(mixed, of_mixed, seen)
        wholes = [whole(each.detach()) for each in mixed]
        told[name] = {
            "difference": max(float((a.detach() - b).abs().max()) for a, b in zip(plain, wholes, strict=True)),
            "seen": seen,
            "rates": [[group["lr"] for group in one.param_groups] for one in (of_plain, of_mixed)],
            "saved": [one.state_dict()["param_groups"] for one in (of_plain, of_mixed)],
        }
    told["failed"] = _fail()
    write_down(folder, told)
    dist.destroy_process_group()


def _fail() -> list[int]:
    """How many groups there are after a step that failed, and after one that did not; neither has a closure."""
    given = weights(divided=True)
    optimizer = AdamW(groups_of(given), fused=True)
    counts = []
    for rate in (None, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        for weight in given:
            weight.grad = weight.detach()
        with suppress(TypeError), stepping_by_kind(optimizer):
            optimizer.step()
        counts.append(len(optimizer.param_groups))
    return counts


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("kinds")
    job = Job("kinds", f"{__name__}:step_all_kinds", 1)
    (found,) = read_down(run_jobs(folder, [job])[job.name].check().folder)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_of_several_kinds_are_stepped_as_plain_ones(told, name):
    assert told[name]["difference"] <= 1e-6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_closures_schedulers_and_checkpoints_see_the_groups_of_the_user(told, name):
    assert told[name]["seen"] == [3] * STEPS
    plain, mixed = told[name]["rates"]
    assert mixed == plain
    plain, mixed = told[name]["saved"]
    assert mixed == plain


def test_a_step_that_fails_leaves_the_groups_of_the_user(told):
    assert told["failed"] == [3, 3]
