"""Size and time of change of the files that hold media, by which one that was rewritten is noticed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.data_path import is_local
from flowtrain_lightning.data.media.loaded_media import OwnMedia
from flowtrain_lightning.data.media.media_files import MediaAddress, MediaError, NamedMedia, file_of, kind_of
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.packing import IntArray

_UNKNOWN = (-1, -1)
"""Of what lies in the data, which are compared themselves, or behind an address, where asking takes a while."""

_GONE = (-2, -2)

_STATS_AT_ONCE = 1024


class MediaStatus(NamedTuple):
    """Files of media items when they were measured.

    Attributes:
        names: of each item its path, relative to the data where it lies beside or below them; empty where it is in no
            local file.
        found: ``[media items, 2]`` bytes, and when it was changed last in nanoseconds; -1 where it is in no local file.
    """

    names: list[str]
    found: IntArray

    @classmethod
    def none(cls) -> MediaStatus:
        """That of no media items."""
        return cls([], np.empty((0, 2), np.int64))

    @classmethod
    def of(cls, items: Sequence[NamedMedia], folder: Path) -> MediaStatus:
        """That of these items now.

        Args:
            items: the items.
            folder: of the data.
        """
        paths = [_local_path(item) for item in items]
        names = ["" if path is None else _name(path, folder) for path in paths]
        found = [_UNKNOWN if path is None else _found(path) for path in paths]
        return cls(names, np.asarray(found, np.int64).reshape(-1, 2))

    @classmethod
    def joined(cls, parts: Sequence[MediaStatus]) -> MediaStatus:
        """Several as one."""
        names = [name for part in parts for name in part.names]
        return cls(names, np.concatenate([np.empty((0, 2), np.int64), *(part.found for part in parts)]))

    def first(self, items: int) -> MediaStatus:
        """That of the first so many items."""
        return MediaStatus(self.names[:items], self.found[:items])

    def holds(self, folder: Path) -> bool:
        """Whether all files are as they were.

        Args:
            folder: of the data.
        """
        base = folder if is_local(folder) else Path("/")

        def as_before(start: int) -> bool:
            window = slice(start, start + _STATS_AT_ONCE)
            each = zip(self.names[window], self.found[window].tolist(), strict=True)
            return all(not name or _found(base / name) == tuple(found) for name, found in each)

        with ThreadPoolExecutor() as threads:  # over a network each takes a while
            return all(threads.map(as_before, range(0, len(self.names), _STATS_AT_ONCE)))


def status_of(found: IntArray) -> tuple[tuple[int, int], ...]:
    """``[media items, 2]`` of a record's files, as the record keeps it."""
    return tuple((size, changed) for size, changed in found.tolist())


def refuse_rewritten(item: NamedMedia | OwnMedia, number: int, record: Record) -> None:
    """Raises a DataError where a media item's file is another one than when the record was measured.

    Args:
        item: the media item.
        number: its number in the record.
        record: the record.
    """
    before = record.status[number] if number < len(record.status) else _UNKNOWN
    path = None if isinstance(item, OwnMedia) else _local_path(item)
    if path is None or before == _UNKNOWN or (now := _found(path)) == before:
        return
    how = "is gone; it was removed" if now == _GONE else f"was rewritten ({before[0]} bytes then, {now[0]} now)"
    raise DataError(
        f"{record.where}: {kind_of(item)} {item} {how} after it was indexed, so the sample is not the one that was "
        "planned. Leave files as they are while a run reads them; start again to index it anew."
    )


def _local_path(item: NamedMedia) -> Path | None:
    file = file_of(item)
    if isinstance(file, MediaAddress):
        try:
            file = file.path()
        except (MediaError, DataError):  # told where it is opened
            return None
    return file if isinstance(file, Path) and is_local(file) else None


def _found(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # told where it is opened
        return _GONE
    return found.st_size, found.st_mtime_ns


def _name(path: Path, folder: Path) -> str:
    beside = is_local(folder) and path.is_relative_to(folder)
    return str(path.relative_to(folder) if beside else path.absolute())
