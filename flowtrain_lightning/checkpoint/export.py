"""The way from a checkpoint directory to plain Lightning: as its dictionary, as a ``.ckpt`` file, as a plugin."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from flowtrain_lightning.checkpoint.files import take_name, temporary_name, write_file
from flowtrain_lightning.checkpoint.loading import read_checkpoint
from flowtrain_lightning.checkpoint.loop_progress import with_settled_progress
from flowtrain_lightning.checkpoint.optimizer_state import with_numbers


def export_checkpoint(source: str | Path, target: str | Path, weights_only: bool | None = None) -> None:
    """Writes a checkpoint directory as one plain Lightning ``.ckpt`` file.

    The file holds all that the directory holds but the random states.

    Args:
        source: the directory.
        target: the file to write; one that exists is replaced.
        weights_only: False allows objects other than tensors and plain data; only for files you trust.

    Raises:
        FileNotFoundError: there is no ``source``.
        ValueError: ``source`` is a file, or no checkpoint directory, or of a later format, or holds other objects.
        OSError: ``target`` cannot be written; nothing is left of it.
    """
    _replace(_read_plain(Path(source), weights_only), Path(target).absolute())


@contextmanager
def plain_file(source: str | Path, weights_only: bool | None = None) -> Iterator[Path]:
    """Inside, a plain ``.ckpt`` file with what ``load_from_checkpoint`` needs of a checkpoint directory.

    The file lies in the system's temporary folder (``TMPDIR``) and is about as large as the weights. It has no name
    there, so that nothing stays when the process is killed.
    """
    checkpoint = read_checkpoint(Path(source), weights_only=weights_only, optimizers=False)
    with tempfile.TemporaryFile() as file:
        torch.save(checkpoint, file)
        file.flush()
        yield Path(f"/proc/self/fd/{file.fileno()}")


class FlowCheckpointIO(TorchCheckpointIO):
    """Lets plain Lightning resume from flowtrain's directories.

    ``Trainer(strategy="auto", plugins=[FlowCheckpointIO()]).fit(..., ckpt_path="last.ckpt")``
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Saves as Lightning does; the file may take the name of a directory that is there."""
        if Path(path).is_dir():
            _replace(checkpoint, Path(path).absolute())
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a directory, or what Lightning reads."""
        if Path(path).is_dir():
            return _read_plain(Path(path), kwargs.get("weights_only"))
        return with_settled_progress(super().load_checkpoint(path, *args, **kwargs))


def _read_plain(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    checkpoint = read_checkpoint(path, weights_only=weights_only)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [with_numbers(state) for state in checkpoint["optimizer_states"]]
    return checkpoint


def _replace(checkpoint: dict[str, Any], path: Path) -> None:
    temporary = temporary_name(path)
    try:
        write_file(checkpoint, temporary)
        take_name(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, RuntimeError):
            raise
        # torch's way to tell of a full disk
        raise OSError(f"{path} cannot be written; is there room enough in {path.parent}? ({error})") from error
