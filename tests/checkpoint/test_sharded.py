"""A checkpoint goes from any layout to any other, and to and from one process, to the bit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.checkpoint import (
    export_checkpoint,
    load_checkpoint,
    load_half,
    read_checkpoint,
    save_checkpoint,
)
from flowtrain_lightning.checkpoint.optimizer_state import NamedOptimizer, load_optimizers
from flowtrain_lightning.parallel.ranks.connecting import connect_groups
from flowtrain_lightning.parallel.ranks.groups import Groups
from tests.checkpoint.test_resume import same
from tests.forks import Job, read_down, run_jobs, write_down

ROLES = ("encoder", "backbone")


class Wide(nn.Module):
    """Widens and narrows again, as tensor parallel wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 5)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(rows))) * self.scale[0]


class TwoHalves(nn.Module):
    """A module of two halves; the encoder's odd numbers of rows do not divide among ranks."""

    halves: ClassVar = {"encoder": ("encoder",), "backbone": ("backbone",)}
    held_stages: ClassVar = {}

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 6))
        self.backbone = Wide()

    def optimizer(self) -> torch.optim.Optimizer:
        groups = [{"params": list(self.encoder.parameters())}, {"params": list(self.backbone.parameters()), "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=0.01)


# ---- layouts --------------------------------------------------------------------------------------------------------


def _copies(module: TwoHalves, ranks: int) -> None:
    """Every rank has the whole."""


def _fsdp(module: TwoHalves, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for half in (module.encoder, module.backbone):
        fully_shard(half, mesh=mesh)


def _hsdp(module: TwoHalves, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replica", "shard"))
    for half in (module.encoder, module.backbone):
        fully_shard(half, mesh=mesh)


def _both(module: TwoHalves, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shard", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(module.backbone, mesh["tensor"], plan)
    for half in (module.encoder, module.backbone):
        fully_shard(half, mesh=mesh["shard"])


LAYOUTS: dict[str, tuple[int, Callable[[TwoHalves, int], None]]] = {
    "one process": (1, _copies),
    "copies": (2, _copies),
    "FSDP 4": (4, _fsdp),
    "HSDP 2x2": (4, _hsdp),
    "FSDP 2 x TP 2": (4, _both),
}
"""Number of processes, and what puts the layout onto a module."""


# ---- what the processes do ------------------------------------------------------------------------------------------


def train_and_save(folder: Path, layout: str) -> None:
    """Two steps without a break; ``saved.ckpt`` after the first, ``after.pt`` after the second."""
    groups, module, optimizer, named = _start(layout, seed=1)
    _step(module, optimizer)
    _save(folder / "saved.ckpt", module.state_dict(), groups, optimizer_states=[named.state()], global_step=1)
    _step(module, optimizer)
    _keep(folder / "after.pt", module, named)


def load_all(folder: Path, layout: str, checkpoints: dict[str, str]) -> None:
    """Loads checkpoints of other layouts; ``NUMBER-loaded.pt``, and ``NUMBER-after.pt`` when a step has followed."""
    for number, path in enumerate(checkpoints.values()):
        groups, module, optimizer, named = _start(layout, seed=2)
        allocation = default_allocation(groups.role_ranks, "colocated")
        checkpoint = load_checkpoint(path, module, allocation, groups, TorchCheckpointIO())  # type: ignore[arg-type]
        load_half(module, checkpoint["state_dict"], ROLES)  # type: ignore[arg-type]
        load_optimizers([named], checkpoint["optimizer_states"])
        _keep(folder / f"{number}-loaded.pt", module, named)
        _step(module, optimizer)
        _keep(folder / f"{number}-after.pt", module, named)


def say_what_is_refused(folder: Path) -> None:
    """Four ranks write down what they are told of tensors that cannot be saved, or not be loaded."""
    groups, module, _, _ = _start("FSDP 4", seed=1)
    path = folder / "refused.ckpt"
    mesh = init_device_mesh("cpu", (4,))
    wrong = dict.fromkeys(module.state_dict(), torch.zeros(5, 5))
    own_rows = torch.zeros(2 + groups.role_rank, 2)
    cases: dict[str, Callable[[], Any]] = {
        "summand": lambda: _save(path, {"encoder.a": DTensor.from_local(own_rows[:2], mesh, [Partial()])}, groups),
        "unlike copies": lambda: _save(path, {"encoder.a": own_rows}, groups),
        "other shape": lambda: load_half(module, wrong, ["encoder"], strict=False),  # type: ignore[arg-type]
    }
    told = {}
    for name, attempt in cases.items():
        try:
            attempt()
        except (RuntimeError, ValueError) as error:
            told[name] = str(error)
    write_down(folder, told)


def _save(path: Path, weights: dict[str, Any], groups: Groups, **rest: Any) -> None:
    allocation = default_allocation(groups.role_ranks, "colocated")
    save_checkpoint({"state_dict": weights, **rest}, path, TwoHalves.halves, allocation, groups)


def _start(layout: str, seed: int) -> tuple[Groups, TwoHalves, torch.optim.Optimizer, NamedOptimizer]:
    ranks, apply = LAYOUTS[layout]
    groups = connect_groups(int(os.environ["RANK"]), (tuple(range(ranks)),), "gloo", timedelta(seconds=60))
    module = TwoHalves(seed)
    apply(module, ranks)
    optimizer = module.optimizer()
    return groups, module, optimizer, NamedOptimizer(optimizer, module)


def _step(module: TwoHalves, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    rows = torch.linspace(-1, 1, 12).view(4, 3)
    module.backbone(module.encoder(rows)).square().sum().backward()
    optimizer.step()


def _keep(path: Path, module: TwoHalves, named: NamedOptimizer) -> None:
    """Writes the whole of what ranks hold in parts."""
    state = named.state()["state"]
    kept = {
        "weights": {name: _whole(value) for name, value in module.state_dict().items()},
        "state": {name: {entry: _whole(value) for entry, value in entries.items()} for name, entries in state.items()},
    }
    if os.environ["RANK"] == "0":
        torch.save(kept, path)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout -> folder of the run that saved on it."""
    jobs = [
        Job(layout, f"{__name__}:train_and_save", ranks, {"layout": layout}) for layout, (ranks, _) in LAYOUTS.items()
    ]
    done = run_jobs(tmp_path_factory.mktemp("saved"), jobs)
    return {layout: each.check().folder for layout, each in done.items()}


@pytest.fixture(scope="module")
def loaded(saved, tmp_path_factory):
    """Layout -> folder of the run that loaded what all layouts had saved."""
    paths = {layout: str(folder / "saved.ckpt") for layout, folder in saved.items()}
    paths["a plain file"] = str(tmp_path_factory.mktemp("exported") / "plain.ckpt")
    export_checkpoint(paths["FSDP 4"], paths["a plain file"])
    jobs = [
        Job(layout, f"{__name__}:load_all", ranks, {"layout": layout, "checkpoints": paths})
        for layout, (ranks, _) in LAYOUTS.items()
    ]
    done = run_jobs(tmp_path_factory.mktemp("loaded"), jobs)
    return {layout: each.check().folder for layout, each in done.items()}


def kept(path):
    return torch.load(path, weights_only=True)


def largest_difference(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max(largest_difference(one[key], other[key]) for key in one)
    return float((one - other).abs().max())


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_what_one_layout_saved_another_loads_to_the_bit(saved, loaded, source, target):
    checkpoint = read_checkpoint(saved[source] / "saved.ckpt")
    found = kept(loaded[target] / f"{list(LAYOUTS).index(source)}-loaded.pt")
    assert same(found["weights"], checkpoint["state_dict"])
    assert same(found["state"], checkpoint["optimizer_states"][0]["state"])


@pytest.mark.parametrize("target", LAYOUTS)
def test_a_plain_file_of_lightning_loads_into_every_layout_to_the_bit(saved, loaded, target):
    number = list(LAYOUTS).index("FSDP 4")
    same_as = kept(loaded[target] / f"{number}-loaded.pt")
    assert same(kept(loaded[target] / f"{len(LAYOUTS)}-loaded.pt"), same_as)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_the_same_layout_the_next_step_equals_an_unbroken_run_to_the_bit(saved, loaded, layout):
    found = kept(loaded[layout] / f"{list(LAYOUTS).index(layout)}-after.pt")
    assert same(found, kept(saved[layout] / "after.pt"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_saves_what_one_process_trains(saved, layout):
    one, other = (read_checkpoint(saved[each] / "saved.ckpt") for each in ("one process", layout))
    assert largest_difference(one["state_dict"], other["state_dict"]) < 1e-6
    assert same(one["optimizer_states"][0]["param_groups"], other["optimizer_states"][0]["param_groups"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_is_written_once_and_each_rank_writes_only_what_it_holds(saved, layout):
    path = saved[layout] / "saved.ckpt"
    tensors = json.loads((path / "index.json").read_text())["tensors"]
    weight = tensors["weights.backbone.up.weight"]["pieces"]
    files = {piece["file"] for piece in weight}
    parts = {"one process": 1, "copies": 1, "FSDP 4": 4, "HSDP 2x2": 2, "FSDP 2 x TP 2": 4}
    assert len(weight) == parts[layout]
    assert len(files) == parts[layout]
    stored = sum(torch.Size(piece["sizes"]).numel() for tensor in tensors.values() for piece in tensor["pieces"])
    assert stored == sum(torch.Size(tensor["shape"]).numel() for tensor in tensors.values())


@pytest.mark.parametrize("layout", ["copies", "HSDP 2x2"])
def test_ranks_that_hold_the_same_share_the_work(saved, layout):
    path = saved[layout] / "saved.ckpt"
    assert len(list(path.glob("*/rank-*.safetensors"))) == 2 * LAYOUTS[layout][0]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    job = Job("refused", f"{__name__}:say_what_is_refused", 4)
    return read_down(run_jobs(tmp_path_factory.mktemp("refused"), [job])["refused"].check().folder)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("summand", r"is a sum that is still outstanding .* Redistribute it before it is saved or loaded\."),
        (
            "unlike copies",
            r"weights\.encoder\.a is torch\.float32 \(2, 2\) on one rank, but torch\.float32 \(3, 2\) on",
        ),
        (
            "other shape",
            r"does not fit TwoHalves: encoder\.0\.bias: the checkpoint's tensor has shape \(5, 5\), but that",
        ),
    ],
)
def test_what_cannot_be_saved_or_loaded_is_told_on_every_rank(told, case, words):
    for of_rank in told:
        assert re.search(words, of_rank[case])
