"""What the processes do that save and load a module under layouts that shard it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.checkpoint import load_checkpoint, load_half, save_checkpoint
from flowtrain_lightning.checkpoint.optimizer_state import NamedOptimizer, load_optimizers
from flowtrain_lightning.parallel.connecting import connect_groups
from flowtrain_lightning.parallel.groups import Groups
from tests.forks import write_down

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
