"""Whether a folder is one that the ranks of all nodes can see."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from flowtrain_lightning.checkpoint.names import remove, temporary_name
from flowtrain_lightning.parallel.groups import CrossGroup

_PATIENCE_SECONDS = 10.0  # a network file system may show a moment later what another node has made
_LOOK_SECONDS = 0.1


def refuse_url(path: Any, name: str) -> None:
    """Raises for what is no plain path.

    Raises:
        ValueError: says what was given, and what to do.
    """
    if "://" in str(path):
        raise ValueError(
            f"{name} {str(path)!r} is a URL, but flowtrain writes checkpoint directories to a local or mounted file "
            "system. Give a plain path, and copy the finished directory where you need it."
        )


def refuse_unshared_folder(folder: Path, cross: CrossGroup) -> None:
    """Raises on every rank where not all see the same folder; makes it. Every rank calls it.

    Raises:
        FileNotFoundError: names the folder, the ranks that do not see it, and what to do.
    """
    probe: Path = cross.broadcast_object(make_temporary(folder / "probe") if cross.rank == 0 else None, 0)
    refuse_unseen(probe, cross)
    if cross.rank == 0:
        remove(probe)


def make_temporary(path: Path) -> Path:
    """An empty directory beside ``path``, of a name that was never there before."""
    temporary = temporary_name(path)
    temporary.mkdir()
    return temporary


def refuse_unseen(made: Path, cross: CrossGroup) -> None:
    """Raises on every rank where one does not see the directory that rank 0 has made; it is removed then.

    Raises:
        FileNotFoundError: names the folder, the ranks that do not see it, and what to do.
    """
    sees_it = torch.zeros(cross.ranks)
    sees_it[cross.rank] = _appears(made)
    blind = (cross.all_reduce(sees_it) == 0).nonzero().flatten().tolist()
    if not blind:
        return
    if cross.rank == 0:
        remove(made)
    raise FileNotFoundError(
        f"{'Rank' if len(blind) == 1 else 'Ranks'} {', '.join(map(str, blind))} cannot see what rank 0 writes into "
        f"{made.parent}, so a checkpoint there would lack their parts. Name a folder on a file system that all nodes "
        "share: Trainer(default_root_dir=...), or ModelCheckpoint(dirpath=...)."
    )


def _appears(made: Path) -> bool:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not made.is_dir():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True
