"""How a finished directory takes its name, and loses it, in one step: a kill leaves all of it or nothing.

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
from pathlib import Path
from typing import Any

import torch

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE = -100  # AT_FDCWD
_PARTIAL = re.compile(r"\.(.+)\.partial-(.+-\d+)-(\d+)-\d+")
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_numbers = itertools.count()


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


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial-{_place()}-{os.getpid()}-{next(_numbers)}")


def _place() -> str:
    """Where this process has its number: the host, and the number's space there (0 where a system has no such)."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()}-{space.stat().st_ino if space.exists() else 0}"


def _is_leftover(found: str, saved: str) -> bool:
    """Whether nobody works on ``found``: it has the name that is being saved, or its process is no more."""
    parts = _PARTIAL.fullmatch(found)
    if parts is None:
        return False
    name, place, process = parts.groups()
    if name == saved:
        return True
    return place == _place() and (int(process) == os.getpid() or not _is_alive(int(process)))


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
