"""Writing in which all ranks take part: where one of them cannot, for want of room say, all say so alike."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from flowtrain_lightning.parallel.groups import CrossGroup


class OtherRankFailed(RuntimeError):
    """This rank cannot write since another one could not."""


@contextmanager
def written_together(path: Path, cross: CrossGroup) -> Iterator[None]:
    """Inside, this rank writes its part of ``path``; afterwards all ranks have written, or all raise. All enter it.

    Any other error, such as that of a killed data worker, which PyTorch raises wherever a process happens to be, leaves
    it at once, as everywhere else: the other ranks are told by the watchdog.

    Args:
        path: the checkpoint.
        cross: of this rank; no collective of it runs inside.

    Raises:
        OSError: on every rank, alike; names the ranks that could not write, why not, and what to do.
    """
    own: Exception | None = None
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not _is_of_writing(error):
            raise
        own = error
    failures = int(cross.all_reduce(torch.tensor([int(own is not None)])))
    if not failures:
        return
    is_first_hand = own is not None and not isinstance(own, OtherRankFailed)
    refusal = _system_error(own)
    reason = f"{refusal.strerror if refusal else own}{_free(path.parent)}"
    told = cross.gather_objects(reason if is_first_hand else None)
    reasons = [f"rank {rank} could not write its part: {text}" for rank, text in enumerate(told) if text]
    raise OSError(
        f"The checkpoint {path} was not saved; {'; '.join(reasons)}. Nothing is left of it, and earlier checkpoints "
        "are as they were. Make room there, or name another folder (Trainer(default_root_dir=...), "
        'ModelCheckpoint(dirpath=...)), and go on from the one before: fit(..., ckpt_path="last").'
    ) from (None if refusal or not is_first_hand else own)


def _is_of_writing(error: Exception) -> bool:
    """Whether an error says that something could not be written; PyTorch's writer has no type of its own for it."""
    known = isinstance(error, OSError | OtherRankFailed) or _system_error(error) is not None
    return known or "inline_container.cc" in str(error)


def _system_error(error: BaseException | None) -> OSError | None:
    """What the system said, around which PyTorch puts errors of its own."""
    while error is not None and not (isinstance(error, OSError) and error.strerror):
        error = error.__cause__ or error.__context__
    return error


def _free(folder: Path) -> str:
    with suppress(OSError):
        return f" ({shutil.disk_usage(folder).free / 1e6:,.1f} MB are free in {folder})"
    return ""
