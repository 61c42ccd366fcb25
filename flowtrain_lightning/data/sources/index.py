"""The index of a store of records: where they lie and how large they are, measured once and kept beside the store."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4
from zipfile import BadZipFile

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from flowtrain_lightning.data.data_path import is_local
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.media.media_status import MediaStatus
from flowtrain_lightning.data.sources.measurers import Measurer, measure_store, this_process
from flowtrain_lightning.data.sources.measuring import Measure, Unreadable, measured_media
from flowtrain_lightning.data.sources.record_store import RecordStore, locations_of
from flowtrain_lightning.packing import IntArray, SampleSizes
from flowtrain_lightning.packing.setting_values import check_settings

TooLong = Literal["error", "drop", "truncate"]

_NAMES = "media_names"
"""Under which the names of media's files are kept, each with a byte of zero behind it."""

_SIZES = ("tokens", "targets", "media_start", "media_rows", "media_patches", "media_content", "media_parts")
"""Sizes that are kept; modalities only where some items are no images and videos to be encoded."""

_MODALITY = "media_modality"


@dataclass(frozen=True)
class IndexConfig:
    """The records that are used, and the place of their sizes: the section ``index`` of a data module.

    Attributes:
        too_long: what happens to a sample longer than the token budget: ``"error"``; ``"drop"``; or ``"truncate"``,
            which cuts its end, never inside an image (of a prompt that is where the answer would begin).
        unreadable: what happens to a record with a media item that cannot be used: ``"error"``; or ``"drop"``, for
            which each is decoded once when the file is indexed, so that all ranks drop the same records.
        cache_dir: the folder of the indexes; None is ``.flowtrain`` beside each file, or ``~/.cache/flowtrain`` where
            that cannot be written.
    """

    too_long: TooLong = "error"
    unreadable: Unreadable = "error"
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class IndexTable:
    """Places and sizes of one store's records, before any is dropped or cut.

    Attributes:
        content: the fingerprint of the store's content.
        locations: ``[records, 2]`` where each record lies.
        readable: ``[records]`` False where an image cannot be used; the sizes are then 0.
        sizes: the sizes of all records.
        animated: images of which only the first picture is used.
        media_found: ``[media items, 2]`` size and time of change of their files, see `MediaStatus`.
    """

    content: str
    locations: IntArray
    readable: NDArray[np.bool_]
    sizes: SampleSizes
    animated: int
    media_found: IntArray

    def __len__(self) -> int:
        return len(self.locations)


def index_table(
    store: RecordStore,
    measure: Measure,
    cache_dir: str | Path | None,
    measurer: Measurer = this_process,
    *,
    media_compared: bool = False,
) -> IndexTable:
    """The table of one store: from the cache where it still holds, else measured and put there.

    The cache holds if it was made by the same measure from the same content. A store with the status (of a
    file, size and modification time) that the cache remembers is taken to have the same content; otherwise its content
    is compared. Where images could not be used, they are tried again. Where a local file of an image or a video has
    another size or time of change, all is measured anew.

    Args:
        store: the records.
        measure: what decides the sizes.
        cache_dir: the folder of the cache, see :class:`IndexConfig`.
        measurer: does the work, where it has to be measured.
        media_compared: the files of media were compared just now, by another process of this machine.

    Raises:
        DataError: the store, a record or (unless dropped) an image cannot be used.
    """
    cache_files = _cache_files(store, measure, cache_dir)
    for cache_file in cache_files:
        table = _load(cache_file, store, media_compared=media_compared)
        if table is not None and not _mended(table, store, measure):
            return table
    # Taken before reading: what changes meanwhile is measured again next time.
    status = store.status()
    table, media_names = _build(store, measure, measurer)
    _save(table, status, media_names, store, cache_files)
    return table


def _build(store: RecordStore, measure: Measure, measurer: Measurer) -> tuple[IndexTable, list[str]]:
    content = store.content()
    locations = locations_of(store)
    # Only where it takes a while: in a log file every move of the bar stays.
    name, count = f"Indexing {store.name}", len(locations)
    with tqdm(total=count, desc=name, unit=" records", leave=False, delay=2, mininterval=1) as progress:
        found = measure_store(store, locations, measure, measurer, progress.update)
    table = IndexTable(content, locations, found.usable, found.sizes, found.animated, found.status.found)
    return table, found.status.names


def cache_folders(path: Path) -> list[Path]:
    """The folder for the index of a data file: beside it or, where that cannot be written, the user's cache."""
    beside = [path.parent / ".flowtrain"] if is_local(path) and path.parent.is_dir() else []
    return [*beside, *(folder / _folder_name(path) for folder in user_cache())]


def user_cache() -> list[Path]:
    """The user's cache of this package; None for a user without a home, as in a container."""
    with suppress(RuntimeError):
        return [Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowtrain"]
    return []


def _folder_name(path: Path) -> str:
    """A name for the file's folder: a cache for several data folders keeps files of the same name apart."""
    return fingerprint(str(path.parent.resolve() if is_local(path) else path.parent))


def _cache_files(store: RecordStore, measure: Measure, cache_dir: str | Path | None) -> list[Path]:
    path = store.path
    folders = cache_folders(path) if cache_dir is None else [Path(cache_dir) / _folder_name(path)]
    return [folder / f"{path.name}.{measure.fingerprint}.npz" for folder in folders]


def _load(cache_file: Path, store: RecordStore, *, media_compared: bool) -> IndexTable | None:
    try:
        with np.load(cache_file, allow_pickle=False) as file:
            # The names take as long to read as all else, and are needed only to compare the files.
            arrays: dict[str, Any] = {name: file[name] for name in file.files if name != _NAMES or not media_compared}
        content = str(arrays["content"])
        if store.status() != arrays["status"].tolist() and store.content() != content:
            return None
        sizes = SampleSizes(**{name: arrays[name] for name in _SIZES}, media_modality=arrays.get(_MODALITY))
        found = arrays["media_found"]
        if not media_compared and not MediaStatus(_names_in(arrays[_NAMES]), found).holds(store.path.parent):
            return None
        return IndexTable(content, arrays["locations"], arrays["readable"], sizes, int(arrays["animated"]), found)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None  # no cache, or a damaged one: measure again


def _names_in(content: NDArray[np.uint8]) -> list[str]:
    return os.fsdecode(content.tobytes()).split("\0")[:-1]


def _mended(table: IndexTable, store: RecordStore, measure: Measure) -> bool:
    """Whether a record can be used now that could not when the table was made: a folder is mounted since, say."""
    left_out = np.flatnonzero(~table.readable).tolist()
    records = (measure.reaching(store.records(number, table.locations[number : number + 1])[0]) for number in left_out)
    with ThreadPoolExecutor() as threads:
        return any(found.usable for found in threads.map(lambda record: measured_media(record, measure), records))


def _save(
    table: IndexTable, status: list[int], media_names: list[str], store: RecordStore, cache_files: Iterable[Path]
) -> None:
    arrays: dict[str, Any] = {
        "content": np.asarray(table.content),
        "status": np.asarray(status, dtype=np.int64),
        "locations": table.locations,
        "readable": table.readable,
        "animated": np.asarray(table.animated),
        "media_found": table.media_found,
        _NAMES: np.frombuffer(os.fsencode("".join(f"{name}\0" for name in media_names)), np.uint8),
        **{name: getattr(table.sizes, name) for name in _SIZES},
    }
    if table.sizes.media_modality is not None:
        arrays[_MODALITY] = table.sizes.media_modality
    for cache_file in cache_files:
        try:
            _write(cache_file, arrays)
            return
        except OSError as error:
            failure = error
    rank_zero_warn(
        f"The index of {store.name} could not be kept ({failure}), so every process measures it anew; "
        "name a folder that can be written: FlowDataModule(index=IndexConfig(cache_dir=...))."
    )


def _write(cache_file: Path, arrays: dict[str, Any]) -> None:
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    temporary = cache_file.with_name(f".{cache_file.name}.{uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            np.savez(file, **arrays)
        temporary.replace(cache_file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
