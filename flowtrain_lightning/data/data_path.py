"""Paths of data: local ones, or addresses behind ``fsspec``; and the addresses that a record may name."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from flowtrain_lightning.data.data_error import DataError

PROTOCOLS = frozenset({"file", "local", "gs", "gcs", "hf", "s3", "s3a"})
"""Kinds of addresses that a record may name: local files, and stores that only its user's own access opens. Others make
the machine that reads ask whom the record names (http, ftp), or open archives and lists of addresses (zip, reference).
"""

WHOLE_FILES = "its server gives whole files only, and would for each record; copy the file to a disk"
"""Why a file at an address is refused."""

_filesystems: dict[int, Any] = {}
"""What has asked for addresses, kept for as long as the process lives: a fork that let go of its copy would end the
connections of the process that it was forked from, whose requests then wait for ever."""


def data_path(given: str | Path) -> Path:
    """A local path, or one behind ``fsspec`` where ``given`` is an address such as ``s3://bucket/train.jsonl``.

    Raises:
        DataError: what opens addresses is not installed, or knows no such kind.
    """
    if isinstance(given, Path) or "://" not in given:
        return Path(given)
    try:
        from upath import UPath
    except ImportError as error:
        raise DataError(
            f"{given}: reading from an address needs universal-pathlib and fsspec; install them with: "
            "pip install 'flowtrain-lightning[data]'"
        ) from error
    try:
        remote: Any = UPath(given)  # has the methods of a Path
        _keep(remote)  # asks for the library of this kind of address
    except (ImportError, ValueError) as error:
        raise DataError(f"{given}: this kind of address cannot be read: {error}") from error
    return remote  # type: ignore[no-any-return]


def is_local(path: Path) -> bool:
    """Whether the operating system can open it."""
    return isinstance(path, Path)


def in_this_process(path: Path) -> Path:
    """The same path, which asks by connections of this process: those of an address do not outlive a fork."""
    if is_local(path):
        return path
    own: Any = pickle.loads(pickle.dumps(path))  # as one that was sent here
    _keep(own)
    return own  # type: ignore[no-any-return]


def part_of(remote: Path, offset: int, length: int) -> bytes:
    """``length`` bytes of a file at an address from ``offset`` on, and none beside them; fewer where it ends.

    What opens such a file would read megabytes ahead, for each record anew.

    Raises:
        OSError: they cannot be had.
    """
    asked: Any = remote
    try:
        content: bytes = asked.fs.cat_file(asked.path, start=offset, end=offset + length)
    except OSError:
        raise
    except Exception as error:  # each kind of address has a library, which raises errors of its own
        raise OSError(f"{type(error).__name__}: {error}") from error
    if len(content) > length:
        raise OSError(WHOLE_FILES)
    return content


def _keep(remote: Any) -> None:
    filesystem = remote.fs
    _filesystems[id(filesystem)] = filesystem


def protocols_of(address: str) -> list[str]:
    """The kinds of an address, several where ``fsspec`` chains them: ``["zip", "s3"]`` of ``zip://a.png::s3://b/c.zip``.

    Kinds are written in small letters, in any way else as they stand, so that what is no kind is not taken for one.
    """
    return [part.partition("://")[0].lower() for part in address.split("::")]


def named_protocols(given: Iterable[str]) -> frozenset[str]:
    """Kinds of addresses that a user allows records to name, beside `PROTOCOLS`.

    Raises:
        DataError: one is unknown to ``fsspec``, or needs a library that is not installed.
    """
    if isinstance(given, str):
        raise DataError(f"protocols is {given!r}; give a list of kinds of addresses, such as [{given!r}].")
    found = frozenset(each.lower().removesuffix("://") for each in given)
    for protocol in sorted(found):
        check_readable(protocol)
    return found


@cache
def check_readable(protocol: str) -> None:
    """Ask for the library of a kind of addresses.

    Raises:
        DataError: it is not installed, or there is none.
    """
    try:
        import fsspec  # type: ignore[import-untyped]
        import upath  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"addresses of the kind {protocol!r} need universal-pathlib and fsspec; install them with: "
            "pip install 'flowtrain-lightning[data]'"
        ) from error
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise DataError(f"addresses of the kind {protocol!r} cannot be read: {error}") from error
