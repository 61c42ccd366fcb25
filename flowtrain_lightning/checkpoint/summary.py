"""Lists checkpoints below some folders, newest first, so that a run can tell from which it goes on.

The newest is the one that was saved last, by the time that it holds itself: the clock when it was saved, but always
later than the checkpoint from which its run went on and those that this run had saved before. So a clock that was put
back, or that of another host, never makes a run older than what it goes on from. Files of plain Lightning, and
directories of earlier versions, hold no time; of these the file system's counts.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowtrain_lightning.checkpoint.index_file import INDEX, parse_index, read_index
from flowtrain_lightning.checkpoint.loop_progress import with_settled_progress
from flowtrain_lightning.checkpoint.saving import OBJECTS
from flowtrain_lightning.checkpoint.stored_keys import parse_key

_TICK_SECONDS = 1e-3
_WEIGHTS = "state_dict"
_PLAIN = ".ckpt"


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint's summary of itself.

    Attributes:
        path: directory, or file of plain Lightning.
        saved: when, in seconds; see above.
        step: optimizer steps done.
        epoch: epochs done.
        module: class of the module; None where that is not kept.
        weights: name -> shape, of what lies on halves at least.
        names_all: whether no weight may be missing in ``weights``.
        lightning: Lightning's checkpoint, less weights and what JSON cannot hold.
        holds_all: whether nothing may be missing in ``lightning``.
        fault: why it cannot be read; None where it can.
    """

    path: Path
    saved: float
    step: int = 0
    epoch: int = 0
    module: str | None = None
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    names_all: bool = True
    lightning: Mapping[str, Any] = field(default_factory=dict)
    holds_all: bool = True
    fault: str | None = None

    def damage(self) -> str | None:
        """Why it is not whole, by a look at all that it should have; None where nothing is missing."""
        if self.path.is_dir():
            try:
                read_index(self.path)
            except (OSError, ValueError) as error:
                return str(error)
        return None


def checkpoints_below(folders: Iterable[Path], weights_only: bool | None = None) -> list[CheckpointSummary]:
    """All checkpoints below the folders, newest first. Those that are being written or removed are left out.

    Args:
        folders: those that are not there have none.
        weights_only: False allows plain files with objects other than tensors and plain data.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        for path in _paths_below(folder):
            real = path.resolve()
            found[real] = found[real] if real in found and path.is_symlink() else path
    summaries = (_summary(path, weights_only) for path in found.values())
    known = [summary for summary in summaries if summary is not None]
    return sorted(known, key=lambda summary: (summary.saved, summary.step, str(summary.path)), reverse=True)


def time_of_save(before: float) -> float:
    """The time that a checkpoint holds which is saved now.

    Args:
        before: that of the checkpoint before it in the same run, or from which the run went on.
    """
    return max(time.time(), before + _TICK_SECONDS)


def saved_time(checkpoint: Mapping[str, Any], path: Path) -> float:
    """When a checkpoint, as Lightning's dictionary, was saved."""
    return _saved(checkpoint.get("flowtrain", {}), path)


def _saved(run: Mapping[str, Any], path: Path) -> float:
    told = run.get("saved")
    if isinstance(told, int | float):
        return float(told)
    file = path / INDEX if path.is_dir() else path
    return file.stat().st_mtime if file.exists() else 0.0  # behind a URL


def _paths_below(folder: Path) -> Iterator[Path]:
    """Directories with an index, and files of plain Lightning's ending. Hidden ones are partial, or nobody's affair."""
    for place, folders, files in os.walk(folder):
        here = Path(place)
        if INDEX in files:
            folders.clear()
            yield here
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (here / name for name in folders if (here / name).is_symlink() and (here / name / INDEX).is_file())
        yield from (here / name for name in files if name.endswith(_PLAIN) and not name.startswith("."))


def _summary(path: Path, weights_only: bool | None) -> CheckpointSummary | None:
    """Reads the summary; None for what is no checkpoint, or no longer there."""
    try:
        return _of_directory(path) if path.is_dir() else _of_file(path, weights_only)
    except FileNotFoundError:
        return None


def _of_directory(path: Path) -> CheckpointSummary | None:
    with (path / INDEX).open("rb") as file:
        if not file.readline(64).startswith(b'{"flowtrain"'):
            return None  # the index of something else
    try:
        index = parse_index(path)
    except ValueError as error:
        return CheckpointSummary(path, _saved({}, path), fault=str(error))
    places = ((parse_key(key), stored.shape) for key, stored in index.tensors.items())
    return CheckpointSummary(
        path,
        _saved(index.run, path),
        *_progress(index.lightning),
        index.run.get("module"),
        {name: shape for (place, name, _), shape in places if place == _WEIGHTS},
        names_all=not any(name.endswith(".pt") for name in index.files),
        lightning=index.lightning,
        holds_all=OBJECTS not in index.files,
    )


def _of_file(path: Path, weights_only: bool | None) -> CheckpointSummary | None:
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return None  # no file of PyTorch's
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only is not False)
    except pickle.UnpicklingError:
        fault = "it holds objects that are no tensors or plain data, which only weights_only=False reads"
        return CheckpointSummary(path, _saved({}, path), fault=fault)
    except (OSError, RuntimeError) as error:
        return CheckpointSummary(path, _saved({}, path), fault=f"it cannot be read: {error}")
    if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
        return None
    run = checkpoint.get("flowtrain", {})
    weights = {name: tuple(value.shape) for name, value in checkpoint[_WEIGHTS].items() if hasattr(value, "shape")}
    rest = {name: value for name, value in checkpoint.items() if name != _WEIGHTS}
    return CheckpointSummary(path, _saved(run, path), *_progress(rest), run.get("module"), weights, lightning=rest)


def _progress(lightning: Mapping[str, Any]) -> tuple[int, int]:
    """Steps and epochs done."""
    loops = with_settled_progress(dict(lightning)).get("loops", {})
    epochs = loops.get("fit_loop", {}).get("epoch_progress", {}).get("current", {})
    return int(lightning.get("global_step", 0)), int(epochs.get("processed", lightning.get("epoch", 0)))
