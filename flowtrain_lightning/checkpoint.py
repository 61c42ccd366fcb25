"""Checkpoint directories: one folder per role, by parameter name, plus a meta file; written all or not at all.

::

    last.ckpt/
        meta.pt       what Lightning saves, less weights and optimizer state; what flowtrain needs to resume
        rng.pt        the random states of every rank
        encoder/      weights and optimizer state of the half (torch.distributed.checkpoint), scalars.pt
        backbone/     likewise
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.allocator.roles import ROLES
from flowtrain_lightning.runtime.groups import Groups
from flowtrain_lightning.runtime.halves import role_of
from flowtrain_lightning.runtime.optimizers import NamedState, with_numbers

FORMAT = 1
META = "meta.pt"
RNG = "rng.pt"
SCALARS = "scalars.pt"

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE = -100  # AT_FDCWD


# ---- saving ---------------------------------------------------------------------------------------------------------


def save_checkpoint(
    checkpoint: dict[str, Any],
    filepath: Any,
    halves: Mapping[str, tuple[str, ...]],
    allocation: Allocation,
    groups: Groups,
) -> None:
    """Writes a checkpoint directory. Every rank calls it with its own part.

    Everything goes into a temporary directory beside ``filepath``, is flushed to the disk and takes its name in one
    atomic step. A kill at any moment leaves the former checkpoint whole.

    Args:
        checkpoint: Lightning's checkpoint, with this rank's ``state_dict`` and named ``optimizer_states``.
        filepath: the directory to write; rank 0's counts.
        halves: role -> module paths.
        allocation: recorded, so that a resume can tell whether the layout is the same.
        groups: of this rank.
    """
    cross = groups.cross
    path, temporary = cross.broadcast_object(_names(filepath) if cross.rank == 0 else None, 0)
    if cross.rank == 0:
        _remove_unfinished(path)
        temporary.mkdir(parents=True)
    cross.barrier()
    weights: dict[str, Tensor] = checkpoint.pop("state_dict")
    optimizers: list[NamedState] = checkpoint.pop("optimizer_states", [])
    for role in ROLES:
        if cross.rank in allocation.ranks[role]:
            _save_role(temporary / role, role, weights, optimizers, halves, is_first=groups.role_rank == 0)
    states = cross.gather_objects(_random_states())
    if cross.rank == 0:
        checkpoint["state_dict"] = {n: value for n, value in weights.items() if role_of(n, halves) is None}
        checkpoint["flowtrain"] = {
            "format": FORMAT,
            "placement": allocation.placement,
            "ranks": {role: list(ranks) for role, ranks in allocation.ranks.items()},
            "halves": {role: list(paths) for role, paths in halves.items()},
            "param_groups": [state["param_groups"] for state in optimizers],
        }
        _write(checkpoint, temporary / META)
        _write(states, temporary / RNG)
    cross.barrier()
    if cross.rank == 0:
        _take_name(temporary, path)


def remove_checkpoint(filepath: Any) -> None:
    """Removes a checkpoint, directory or file."""
    path = Path(filepath)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _save_role(
    folder: Path,
    role: str,
    weights: Mapping[str, Tensor],
    optimizers: list[NamedState],
    halves: Mapping[str, tuple[str, ...]],
    is_first: bool,
) -> None:
    tensors: dict[str, Any] = {f"weights.{n}": value for n, value in weights.items() if role_of(n, halves) == role}
    scalars: dict[tuple[int, str, str], Any] = {}
    for number, optimizer in enumerate(optimizers):
        for name, entries in optimizer["state"].items():
            if role_of(name, halves) != role:
                continue
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[_optimizer_key(number, name, key)] = value
                else:
                    scalars[number, name, key] = value
    save(tensors, checkpoint_id=folder)
    if is_first:
        _write(scalars, folder / SCALARS)


def _names(filepath: Any) -> tuple[Path, Path]:
    if "://" in str(filepath):
        raise ValueError(
            f"The checkpoint path {str(filepath)!r} names a remote file system, but flowtrain writes directories to a "
            "local or mounted one. Give a path, and copy the finished directory where you need it."
        )
    path = Path(filepath).absolute()
    return path, path.with_name(f".{path.name}.saving-{os.getpid()}")


def _remove_unfinished(path: Path) -> None:
    for leftover in path.parent.glob(f".{path.name}.saving-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _write(value: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _take_name(temporary: Path, path: Path) -> None:
    for folder in (temporary, *(temporary / role for role in ROLES)):
        _flush_folder(folder)
    if not path.exists():
        temporary.rename(path)
    else:
        _exchange(temporary, path)
        remove_checkpoint(temporary)
    _flush_folder(path.parent)


def _exchange(one: Path, other: Path) -> None:
    """Swaps two names in one atomic step; where the file system cannot, in two with a moment between them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) != 0:
        between = one.with_name(f"{one.name}.former")
        other.rename(between)
        one.rename(other)
        between.rename(one)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- loading --------------------------------------------------------------------------------------------------------


def load_checkpoint(
    filepath: Any, roles: tuple[str, ...], rank: int, checkpoint_io: CheckpointIO, weights_only: bool | None = None
) -> dict[str, Any]:
    """Reads a checkpoint directory, or a plain Lightning checkpoint with ``checkpoint_io``.

    Restores this rank's random states if the directory holds some.

    Args:
        filepath: directory or file.
        roles: whose halves are read.
        rank: global rank.
        checkpoint_io: reads plain checkpoints.
        weights_only: False allows objects other than tensors and plain data; only for files you trust.
    """
    path = Path(filepath)
    if not path.is_dir():
        return checkpoint_io.load_checkpoint(filepath, map_location="cpu", weights_only=weights_only is not False)
    checkpoint = read_checkpoint(path, roles, weights_only)
    states = torch.load(path / RNG, weights_only=True)
    if rank < len(states):
        _restore_random_states(states[rank])
    return checkpoint


def read_checkpoint(path: Path, roles: tuple[str, ...] = ROLES, weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint directory as Lightning's dictionary, with optimizer states by parameter name.

    Raises:
        ValueError: the directory is no checkpoint of flowtrain, or of a later format.
    """
    if not (path / META).is_file():
        raise ValueError(f"{path} is a directory without {META}: no checkpoint of flowtrain. Give another path.")
    checkpoint: dict[str, Any] = torch.load(path / META, map_location="cpu", weights_only=weights_only is not False)
    if checkpoint["flowtrain"]["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {checkpoint['flowtrain']['format']}, but this version of flowtrain reads up to "
            f"{FORMAT}. Update flowtrain-lightning."
        )
    groups = checkpoint["flowtrain"]["param_groups"]
    optimizers: list[NamedState] = [{"state": {}, "param_groups": group} for group in groups]
    for role in roles:
        for key, value in _read_tensors(path / role).items():
            kind, _, name = key.partition(".")
            if kind == "weights":
                checkpoint["state_dict"][name] = value
            else:
                number, _, rest = name.partition(".")
                parameter, _, entry = rest.rpartition("#")
                optimizers[int(number)]["state"].setdefault(parameter, {})[entry] = value
        for (number, parameter, entry), value in torch.load(path / role / SCALARS, weights_only=True).items():
            optimizers[number]["state"].setdefault(parameter, {})[entry] = value
    if optimizers:
        checkpoint["optimizer_states"] = optimizers
    return checkpoint


def read_plain_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint directory as the dictionary that plain Lightning writes into a ``.ckpt`` file."""
    checkpoint = read_checkpoint(path)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [with_numbers(state) for state in checkpoint["optimizer_states"]]
    return checkpoint


def export_checkpoint(source: str | Path, target: str | Path) -> None:
    """Writes a checkpoint directory as one plain Lightning ``.ckpt`` file."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.saving-{os.getpid()}")
    _write(read_plain_checkpoint(Path(source)), temporary)
    temporary.replace(target)


@contextmanager
def plain_file(source: str | Path) -> Iterator[Path]:
    """Inside, a plain ``.ckpt`` file with the contents of a checkpoint directory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plain.ckpt"
        export_checkpoint(source, path)
        yield path


class FlowCheckpointIO(TorchCheckpointIO):
    """Lets plain Lightning resume from flowtrain's directories.

    ``Trainer(strategy="auto", plugins=[FlowCheckpointIO()]).fit(..., ckpt_path="last.ckpt")``
    """

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a directory, or what Lightning reads."""
        if Path(path).is_dir():
            return read_plain_checkpoint(Path(path))
        checkpoint: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return checkpoint


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    reader = FileSystemReader(folder)
    tensors: dict[str, Any] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        tensors[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _optimizer_key(number: int, name: str, entry: str) -> str:
    return f"optimizer.{number}.{name}#{entry}"


# ---- random states --------------------------------------------------------------------------------------------------


def _random_states() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": (version, list(numbers), gauss),
        "numpy": (str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)),
    }


def _restore_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
