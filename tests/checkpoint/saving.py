"""What the processes do that save and die without a Trainer."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.checkpoint import files, index_file, read_checkpoint, save_checkpoint, saving, tensor_files
from flowtrain_lightning.checkpoint.background import BackgroundSave
from flowtrain_lightning.parallel.ranks.connecting import connect_groups
from tests.forks import write_down

HALVES = {"encoder": ("encoder",), "backbone": ("backbone", "head")}


class NothingHeld(nn.Module):
    """A module of these halves without weights: whatever is loaded for it comes whole."""

    halves: ClassVar = HALVES
    held_stages: ClassVar = {}


def save(
    folder: Path, paths: list[str], value: float, moment: str | None = None, victim: int = 0, background: bool = False
) -> None:
    """Two ranks save a small checkpoint full of ``value``; at a moment one of them is killed.

    Args:
        folder: not used.
        paths: the directories to save, one after another.
        value: of all numbers.
        moment: a key of ``MOMENTS``.
        victim: the rank to kill.
        background: in threads, which all ranks wait for.
    """
    rank = int(os.environ["RANK"])
    groups = connect_groups(rank, ((0,), (1,)), "gloo", timedelta(seconds=30))
    if moment is not None and rank == victim:
        MOMENTS[moment]()
    for path in paths:
        if background:
            checkpoint = _checkpoint(rank, value)
            weights = [value for value in checkpoint["state_dict"].values() if isinstance(value, torch.Tensor)]
            saving = BackgroundSave(checkpoint, path, HALVES, default_allocation(2), groups)
            for weight in weights:
                weight.zero_()  # training goes on meanwhile
            saving.finish(groups.cross)
        else:
            save_checkpoint(_checkpoint(rank, value), path, HALVES, default_allocation(2), groups)


def save_where_rank_1_is_blind(folder: Path) -> None:
    """Two ranks save once; then rank 1 no longer sees the folder, and both write down what they are told."""
    rank = int(os.environ["RANK"])
    path = folder / "kept" / "last.ckpt"
    save(folder, [str(path)], 1.0)
    if rank == 1:
        files.appears_here = lambda made: False
    groups = connect_groups(rank, ((0,), (1,)), "gloo", timedelta(seconds=30))
    told = []
    for attempt in (
        lambda: save_checkpoint(_checkpoint(rank, 2.0), path, HALVES, default_allocation(2), groups),
        lambda: files.refuse_unshared_folder(path.parent, groups.cross),
    ):
        try:
            attempt()
        except FileNotFoundError as error:
            told.append(str(error))
    assert told[0] == told[1]
    (folder / f"said{rank}.txt").write_text(told[0])


def save_where_no_room_is_left(folder: Path, victim: int, most_bytes: int) -> None:
    """Two ranks save; then one may write files of so many bytes only, and both note what they see; then as before."""
    rank = int(os.environ["RANK"])
    path = folder / "kept" / "last.ckpt"
    save(folder, [str(path)], 1.0)
    if rank == victim:
        leave_room_for(most_bytes)
    try:
        save(folder, [str(path)], 2.0)
    except OSError as error:
        told = str(error)
    leave_room_for(resource.RLIM_INFINITY)
    write_down(folder, {"told": told, "left": [p.name for p in path.parent.iterdir()], "kept": _value_of(path)})
    groups = connect_groups(rank, ((0,), (1,)), "gloo", timedelta(seconds=30))
    groups.cross.barrier()
    save(folder, [str(path)], 3.0)


def save_in_the_background_where_no_room_is_left(folder: Path, most_bytes: int) -> None:
    """Two ranks save, then rank 1 may write files of so many bytes only; both note what they see."""
    rank = int(os.environ["RANK"])
    path = folder / "kept" / "last.ckpt"
    save(folder, [str(path)], 1.0, background=True)
    if rank == 1:
        leave_room_for(most_bytes)
    try:
        save(folder, [str(path)], 2.0, background=True)
    except OSError as error:
        told = str(error)
    leave_room_for(resource.RLIM_INFINITY)
    connect_groups(rank, ((0,), (1,)), "gloo", timedelta(seconds=30)).cross.barrier()
    write_down(folder, {"told": told, "left": [p.name for p in path.parent.iterdir()], "kept": _value_of(path)})


def leave_room_for(most_bytes: int) -> None:
    """This process's files end there, as on a full disk: anyone may set this limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))


def _value_of(path: Path) -> float:
    return float(read_checkpoint(path)["epoch"])


def _checkpoint(rank: int, value: float) -> dict[str, Any]:
    own = ("backbone.a", "head.b") if rank == 0 else ("encoder.a",)
    state = {
        name: {"step": torch.tensor(value), "exp_avg": torch.full((3, 2), value, dtype=torch.bfloat16), "buffer": None}
        for name in own
    }
    groups = [{"lr": value, "params": ["encoder.a", "backbone.a"]}, {"lr": 0.1, "params": ["head.b"]}]
    return {
        "epoch": int(value),
        "state_dict": {
            **{name: torch.full((3, 2), value, dtype=torch.float64) for name in own},
            f"{own[0]}.extra_state": {"value": value},
            "calls": torch.tensor(int(value)),
        },
        "optimizer_states": [{"state": state, "param_groups": groups}],
    }


def _die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _half_written(data: bytes, path: Path) -> None:
    path.write_bytes(data[: len(data) // 2])
    _die()


def _dies_before(holder: Any, name: str, calls: int = 1) -> Callable[[], None]:
    """Installs a death before the given call of a function."""

    def install() -> None:
        real = getattr(holder, name)
        left = [calls]

        def function(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            return real(*args, **kwargs) if left[0] else _die()

        setattr(holder, name, function)

    return install


def _without_exchange(then: Callable[[], None]) -> Callable[[], None]:
    """On a system that has no call for it."""

    def library(*_: Any, **__: Any) -> SimpleNamespace:
        then()
        return SimpleNamespace()

    return lambda: setattr(ctypes, "CDLL", library)


MOMENTS: dict[str, Callable[[], None]] = {
    "before its half": _dies_before(saving, "write_tensors"),
    "in the middle of its half": _dies_before(tensor_files, "digest_of"),
    "before the random states": _dies_before(saving, "write_bytes"),
    "in the middle of the random states": lambda: setattr(saving, "write_bytes", _half_written),
    "before the index": _dies_before(saving, "write_index"),
    "in the middle of the index": lambda: setattr(index_file, "write_bytes", _half_written),
    "before the name": _dies_before(saving, "take_name"),
    "before the exchange": _dies_before(ctypes, "CDLL"),
    "after the exchange": _dies_before(shutil, "rmtree"),
    "in the middle of the removal": _dies_before(os, "rmdir"),
    "without exchange, before the first step": _without_exchange(_dies_before(Path, "rename")),
    "without exchange, between the steps": _without_exchange(_dies_before(Path, "rename", calls=2)),
    "without exchange, after the second step": _without_exchange(_dies_before(shutil, "rmtree")),
    "nowhere, without exchange": _without_exchange(lambda: None),
}
"""When a rank is killed; the last one is not."""
