"""Files and folders of checkpoints: all of them or nothing, seen by all ranks, or refused by all ranks alike.

What is being written or removed lies beside its name as ``.NAME.partial-HOST-SPACE-PROCESS-NUMBER``. Where a kill
leaves such a thing behind, the next save of that name removes it, and so does one of another name that can tell that
the process is gone. SPACE is where process numbers count: a container has its own, and elsewhere they say nothing. The
last number makes each name a new one: a network file system may still know, on another host, what a former one stood
for.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from flowtrain_lightning.parallel.ranks.cross_group import AgreedError, CrossGroup

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE = -100  # AT_FDCWD
_PARTIAL = re.compile(r"\.(.+)\.partial-(.+-\d+)-(\d+)-\d+")
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_numbers = itertools.count()
_PATIENCE_SECONDS = 10.0  # a network file system may show a moment later what another node has made
_LOOK_SECONDS = 0.1


def temporary_name(path: Path) -> Path:
    """A free name beside ``path`` under which its contents are to be written. Removes what kills left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.iterdir():
        if _is_leftover(leftover.name, path.name):
            _remove_now(leftover)
    return _partial(path)


def take_name(temporary: Path, path: Path) -> None:
    """Renames a finished file or directory in one step; what had the name before is removed afterwards.

    On file systems that cannot exchange two names (NFS) it takes two steps, and the former directory is called
    ``NAME.former.SUFFIX`` between them.
    """
    if temporary.is_dir():
        for folder in (*temporary.iterdir(), temporary):
            if folder.is_dir():
                _flush_folder(folder)
    former = path.with_name(f"{path.stem}.former{path.suffix}")
    if not os.path.lexists(path):
        temporary.rename(path)
    elif not _exchange(temporary, path):
        _remove_now(former)
        path.rename(former)
        temporary.rename(path)
    _flush_folder(path.parent)
    _remove_now(temporary)
    _remove_now(former)


def remove(filepath: Any) -> None:
    """Removes a checkpoint, directory or file, if there is one. Its name goes first."""
    path = Path(filepath).absolute()
    if path.is_dir() and not path.is_symlink():
        leftover = _partial(path)
        _remove_now(leftover)
        path.rename(leftover)
        path = leftover
    _remove_now(path)


def write_file(value: Any, path: Path) -> None:
    """``torch.save`` that is on the disk when it returns."""
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def write_bytes(data: bytes, path: Path) -> None:
    """Writes a file that is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def take_usual_mode(path: Path) -> None:
    """Lets others read a file as far as the umask does; safetensors keeps what it writes for the owner alone."""
    usual = _partial(path)
    usual.touch()
    path.chmod(usual.stat().st_mode)
    usual.unlink()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial-{_process_space()}-{os.getpid()}-{next(_numbers)}")


def _process_space() -> str:
    """Returns the host, and the space in which this process has its number (0 where a system has no such)."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}-{space.stat().st_ino if space.exists() else 0}"


def _is_leftover(found: str, saved: str) -> bool:
    """Whether nobody works on ``found``: it has the name that is being saved, or its process is no more."""
    parts = _PARTIAL.fullmatch(found)
    if parts is None:
        return False
    name, space, process = parts.groups()
    if name == saved:
        return True
    return space == _process_space() and (int(process) == os.getpid() or not _is_alive(int(process)))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_now(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error not in _CANNOT:
        raise OSError(error, os.strerror(error), str(other))
    return False


# ---- folders that all ranks share -----------------------------------------------------------------------------------


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
    probe: Path = cross.broadcast_message(make_temporary(folder / "probe") if cross.rank == 0 else None, 0)
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
    sees_it[cross.rank] = appears_here(made)
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


def appears_here(made: Path) -> bool:
    """Whether this rank sees a directory that another one has made, at once or a moment later."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not made.is_dir():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


# ---- writing in which all ranks take part ---------------------------------------------------------------------------


class NotSavedError(OSError, AgreedError):
    """A checkpoint was not saved: names the ranks that could not write, why not, and what to do.

    Args:
        path: the checkpoint.
        told: for each rank why it could not write its part, or None; not all are None.
        remains: a sentence on what is left of it and of earlier ones.
    """

    def __init__(self, path: Path, told: Sequence[str | None], remains: str) -> None:
        causes = {rank: cause for rank, cause in enumerate(told) if cause}
        reasons = "; ".join(f"rank {rank} could not write its part: {cause}" for rank, cause in causes.items())
        super().__init__(
            f"The checkpoint {path} was not saved; {reasons}. {remains} Make room there, or name another folder "
            "(Trainer(default_root_dir=...), ModelCheckpoint(dirpath=...)), and go on from the one before: "
            'fit(..., ckpt_path="last").'
        )
        self.rank = min(causes)


@contextmanager
def written_together(path: Path, cross: CrossGroup) -> Iterator[None]:
    """Inside, this rank writes its part of ``path``; afterwards all ranks have written, or all raise. All enter it.

    Any other error, such as that of a killed data worker, which PyTorch raises wherever a process happens to be, leaves
    it at once, as everywhere else: the other ranks are told by the health monitor.

    Args:
        path: the checkpoint.
        cross: of this rank; no collective of it runs inside.

    Raises:
        NotSavedError: on every rank, alike.
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
    refusal = _system_error(own)
    reason = f"{refusal.strerror if refusal else own}{_free(path.parent)}"
    told = cross.gather_messages(None if own is None else reason)
    remains = "Nothing is left of it, and earlier checkpoints are as they were."
    raise NotSavedError(path, told, remains) from (None if refusal else own)


def _is_of_writing(error: Exception) -> bool:
    """Whether an error says that something could not be written; PyTorch's writer has no type of its own for it."""
    known = isinstance(error, OSError) or _system_error(error) is not None
    return known or "inline_container.cc" in str(error)


def _system_error(error: BaseException | None) -> OSError | None:
    """Returns the system's error, around which PyTorch puts errors of its own."""
    while error is not None and not (isinstance(error, OSError) and error.strerror):
        error = error.__cause__ or error.__context__
    return error


def _free(folder: Path) -> str:
    with suppress(OSError):
        return f" ({shutil.disk_usage(folder).free / 1e6:,.1f} MB are free in {folder})"
    return ""
