"""The table of sizes of one data file: measured once, kept in a cache file beside the data."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import BadZipFile

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from flowtrain_lightning.data.conversation import ChatTemplate
from flowtrain_lightning.data.fingerprint import file_fingerprint, fingerprint
from flowtrain_lightning.data.images import ImageProcessor, PictureError
from flowtrain_lightning.data.records import DataError, Record, RecordPlace, read, scan
from flowtrain_lightning.data.tokenizer import Tokenizer
from flowtrain_lightning.packing import IntArray, SampleSizes

Unreadable = Literal["error", "drop"]

_FORMAT = 1
_WINDOW = 512


@dataclass(frozen=True)
class IndexTable:
    """Where the records of one file lie and how large they are, before any is dropped or cut.

    Attributes:
        content: the name of the file's content.
        offsets: ``[records]`` where each record begins, in bytes.
        lengths: ``[records]`` its bytes.
        readable: ``[records]`` False where a picture cannot be used; the sizes are then 0.
        sizes: the sizes of all records.
    """

    content: str
    offsets: IntArray
    lengths: IntArray
    readable: NDArray[np.bool_]
    sizes: SampleSizes


@dataclass(frozen=True)
class Measure:
    """What decides a record's sizes.

    Attributes:
        tokenizer: makes ids of text.
        template: how a conversation is written.
        images: how large a picture becomes.
        unreadable: ``"error"`` reads headers of pictures alone and stops at a picture that cannot be used; ``"drop"``
            decodes each picture whole, and marks such records.
        prompt: measure what ``predict`` reads.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    images: ImageProcessor
    unreadable: Unreadable
    prompt: bool

    @property
    def fingerprint(self) -> str:
        """Changes with anything that may change a size."""
        rule = [asdict(self.template), asdict(self.images), self.unreadable, self.prompt]
        return fingerprint([_FORMAT, self.tokenizer.fingerprint, rule])


def index_table(path: Path, measure: Measure, cache_dir: Path | None) -> IndexTable:
    """The table of one file: from the cache where it still holds, else measured and put there.

    The cache holds if it was made by the same measure from the same content. A file with the size and modification
    time that the cache remembers is taken to have the same content; otherwise its content is compared. Where pictures
    could not be used, they are tried again.

    Args:
        path: the data file.
        measure: what decides the sizes.
        cache_dir: the folder of the cache; None is ``.flowtrain`` beside the data, or ``~/.cache/flowtrain`` where
            that cannot be written.

    Raises:
        DataError: the file, a record or (unless dropped) a picture cannot be used.
    """
    if not path.is_file():
        is_folder = "this is a folder; name its files, several as a list."
        raise DataError(f"{path}: {is_folder if path.is_dir() else 'there is no such file.'}")
    places = _cache_files(path, measure, cache_dir)
    for place in places:
        if (table := _load(place, path)) is not None and not _mended(table, path, measure):
            return table
    # Taken before reading: a file that changes meanwhile is measured again next time.
    status = _status(path)
    table = _build(path, measure)
    _save(table, status, path, places)
    return table


class _Pictures(NamedTuple):
    patches: IntArray
    rows: IntArray
    usable: bool


def _build(path: Path, measure: Measure) -> IndexTable:
    found: list[tuple[int, int, bool, int, int, int]] = []
    rows: list[IntArray] = []
    patches: list[IntArray] = []
    content = file_fingerprint(path)
    size = path.stat().st_size
    name = f"Indexing {path.name}"
    # Only where it takes a while: in a log file every move of the bar stays.
    progress = tqdm(total=size, desc=name, unit="B", unit_scale=True, leave=False, delay=2, mininterval=1)
    with progress, ThreadPoolExecutor() as threads:
        for window in _windows(scan(path)):
            # Threads hide the latency of opening pictures; tokenizers need not be safe in threads.
            pictures = threads.map(lambda place: _pictures(place.record, measure), window)
            for place, measured in zip(window, pictures, strict=True):
                tokens = targets = media = 0
                if measured.usable:
                    sequence = measure.template.sequence(
                        place.record, measure.tokenizer, measured.rows, prompt=measure.prompt
                    )
                    tokens, targets, media = len(sequence), sequence.targets, len(sequence.media_rows)
                found.append((place.offset, place.length, measured.usable, tokens, targets, media))
                rows.append(measured.rows[:media])
                patches.append(measured.patches[:media])
                progress.update(place.offset + place.length - progress.n)
    columns = np.asarray(found, dtype=np.int64).reshape(-1, 6).T.copy()
    sizes = SampleSizes(
        tokens=columns[3],
        targets=columns[4],
        media_start=np.concatenate([[0], np.cumsum(columns[5])]).astype(np.int64),
        media_rows=np.concatenate([np.empty(0, np.int64), *rows]),
        media_patches=np.concatenate([np.empty(0, np.int64), *patches]),
    )
    return IndexTable(content, columns[0], columns[1], columns[2].astype(bool), sizes)


def _windows(places: Iterator[RecordPlace]) -> Iterator[list[RecordPlace]]:
    while window := list(islice(places, _WINDOW)):
        yield window


def _pictures(record: Record, measure: Measure) -> _Pictures:
    heights, widths = [], []
    for picture in record.pictures:
        try:
            height, width = measure.images.header(picture)
            measure.images.size(height, width)
            if measure.unreadable == "drop":
                measure.images.check(picture)
        except PictureError as error:
            if measure.unreadable == "drop":
                nothing = np.empty(0, np.int64)
                return _Pictures(nothing, nothing, False)
            raise DataError(
                f"{record.where}: picture {picture} cannot be used: {error}; "
                "correct the record, or leave such records out with unreadable='drop'."
            ) from error
        heights.append(height)
        widths.append(width)
    patches, rows = measure.images.sizes(np.asarray(heights, np.int64), np.asarray(widths, np.int64))
    return _Pictures(patches, rows, True)


def cache_folders(path: Path) -> list[Path]:
    """Where to keep what is measured of a data file: beside it, or, where that cannot be written, with the user."""
    folders = [path.parent / ".flowtrain"]
    with suppress(RuntimeError):  # who runs in a container may have no home
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folders.append(home / "flowtrain" / _apart(path))
    return folders


def _apart(path: Path) -> str:
    """A name for the file's folder: what serves several data folders keeps files of the same name apart."""
    return fingerprint(str(path.parent.resolve()))


def _cache_files(path: Path, measure: Measure, cache_dir: Path | None) -> list[Path]:
    folders = cache_folders(path) if cache_dir is None else [cache_dir / _apart(path)]
    return [folder / f"{path.name}.{measure.fingerprint}.npz" for folder in folders]


def _load(place: Path, path: Path) -> IndexTable | None:
    try:
        with np.load(place, allow_pickle=False) as file:
            arrays: dict[str, Any] = {name: file[name] for name in file.files}
        content = str(arrays["content"])
        if _status(path) != arrays["status"].tolist() and file_fingerprint(path) != content:
            return None
        names = ("tokens", "targets", "media_start", "media_rows", "media_patches")
        sizes = SampleSizes(**{name: arrays[name] for name in names})
        return IndexTable(content, arrays["offsets"], arrays["lengths"], arrays["readable"], sizes)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None  # no cache, or a damaged one: measure again


def _mended(table: IndexTable, path: Path, measure: Measure) -> bool:
    """Whether a record can be used now that could not when the table was made, as a folder was not mounted, say."""
    left_out = np.flatnonzero(~table.readable).tolist()
    records = (read(path, number, int(table.offsets[number]), int(table.lengths[number])) for number in left_out)
    with ThreadPoolExecutor() as threads:
        return any(found.usable for found in threads.map(lambda record: _pictures(record, measure), records))


def _status(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _save(table: IndexTable, status: list[int], path: Path, places: Iterable[Path]) -> None:
    arrays: dict[str, Any] = {
        "content": np.asarray(table.content),
        "status": np.asarray(status, dtype=np.int64),
        "offsets": table.offsets,
        "lengths": table.lengths,
        "readable": table.readable,
        **asdict(table.sizes),
    }
    for place in places:
        try:
            _write(place, arrays)
            return
        except OSError as error:
            failure = error
    rank_zero_warn(
        f"The index of {path} could not be kept ({failure}), so every process measures it anew; "
        "name a folder that can be written: FlowDataModule(cache_dir=...)."
    )


def _write(place: Path, arrays: dict[str, Any]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise
