"""The index of a data file: where its records lie and how large they are, measured once and kept beside the file."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from zipfile import BadZipFile

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from flowtrain_lightning.data.conversation import Template
from flowtrain_lightning.data.fingerprint import file_fingerprint, fingerprint
from flowtrain_lightning.data.formats import DataError, LocatedRecord, Record, read, scan
from flowtrain_lightning.data.image_processor import ImageError, ImageProcessor
from flowtrain_lightning.data.tokenization import Tokenizer
from flowtrain_lightning.packing import IntArray, SampleSizes

TooLong = Literal["error", "drop", "truncate"]
Unreadable = Literal["error", "drop"]

_FORMAT = 1
_WINDOW = 512


@dataclass(frozen=True)
class IndexConfig:
    """Which records of the files are used, and where their sizes are kept: the section ``index`` of a data module.

    Attributes:
        too_long: what happens to a sample longer than the token budget: ``"error"``; ``"drop"``; or ``"truncate"``,
            which cuts its end, never inside an image (of a prompt that is where the answer would begin).
        unreadable: what happens to a record with an image that cannot be used: ``"error"``; or ``"drop"``, for which
            every image is decoded once when the file is indexed, so that all ranks drop the same records.
        cache_dir: the folder of the indexes; None is ``.flowtrain`` beside each file, or ``~/.cache/flowtrain`` where
            that cannot be written.
    """

    too_long: TooLong = "error"
    unreadable: Unreadable = "error"
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        for name, given, known in (
            ("too_long", self.too_long, get_args(TooLong)),
            ("unreadable", self.unreadable, get_args(Unreadable)),
        ):
            if given not in known:
                raise ValueError(f"{name} is {given!r}; give one of {', '.join(map(repr, known))}.")


@dataclass(frozen=True)
class IndexTable:
    """Where the records of one file lie and how large they are, before any is dropped or cut.

    Attributes:
        content: the fingerprint of the file's content.
        offsets: ``[records]`` where each record begins, in bytes.
        lengths: ``[records]`` bytes of each record.
        readable: ``[records]`` False where an image cannot be used; the sizes are then 0.
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
        images: how large an image becomes.
        unreadable: ``"error"`` reads only the headers of images and stops at one that cannot be used; ``"drop"``
            decodes each image whole, and marks such records.
        prompt: measure what ``predict`` reads.
    """

    tokenizer: Tokenizer
    template: Template
    images: ImageProcessor
    unreadable: Unreadable
    prompt: bool

    @property
    def fingerprint(self) -> str:
        """Changes with anything that may change a size."""
        rule = [self.template.fingerprint, self.images.fingerprint, self.unreadable, self.prompt]
        return fingerprint([_FORMAT, self.tokenizer.fingerprint, rule])


def index_table(path: Path, measure: Measure, cache_dir: str | Path | None) -> IndexTable:
    """The table of one file: from the cache where it still holds, else measured and put there.

    The cache holds if it was made by the same measure from the same content. A file with the size and modification
    time that the cache remembers is taken to have the same content; otherwise its content is compared. Where images
    could not be used, they are tried again.

    Args:
        path: the data file.
        measure: what decides the sizes.
        cache_dir: the folder of the cache, see :class:`IndexConfig`.

    Raises:
        DataError: the file, a record or (unless dropped) an image cannot be used.
    """
    if not path.is_file():
        is_folder = "this is a folder; name its files, several as a list."
        raise DataError(f"{path}: {is_folder if path.is_dir() else 'there is no such file.'}")
    cache_files = _cache_files(path, measure, cache_dir)
    for cache_file in cache_files:
        if (table := _load(cache_file, path)) is not None and not _mended(table, path, measure):
            return table
    # Taken before reading: a file that changes meanwhile is measured again next time.
    status = _status(path)
    table = _build(path, measure)
    _save(table, status, path, cache_files)
    return table


class _MeasuredImages(NamedTuple):
    """``[images]`` patches and rows of features of a record's images, and whether all of them can be used."""

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
            # Threads hide the latency of opening images; tokenizers need not be safe in threads.
            images = threads.map(lambda located: _measured_images(located.record, measure), window)
            for located, measured in zip(window, images, strict=True):
                tokens = targets = media = 0
                if measured.usable:
                    sequence = measure.template.sequence(
                        located.record, measure.tokenizer, measured.rows, prompt=measure.prompt
                    )
                    tokens, targets, media = len(sequence), sequence.targets, len(sequence.media_rows)
                found.append((located.offset, located.length, measured.usable, tokens, targets, media))
                rows.append(measured.rows[:media])
                patches.append(measured.patches[:media])
                progress.update(located.offset + located.length - progress.n)
    columns = np.asarray(found, dtype=np.int64).reshape(-1, 6).T.copy()
    sizes = SampleSizes(
        tokens=columns[3],
        targets=columns[4],
        media_start=np.concatenate([[0], np.cumsum(columns[5])]).astype(np.int64),
        media_rows=np.concatenate([np.empty(0, np.int64), *rows]),
        media_patches=np.concatenate([np.empty(0, np.int64), *patches]),
    )
    return IndexTable(content, columns[0], columns[1], columns[2].astype(bool), sizes)


def _windows(located: Iterator[LocatedRecord]) -> Iterator[list[LocatedRecord]]:
    while window := list(islice(located, _WINDOW)):
        yield window


def _measured_images(record: Record, measure: Measure) -> _MeasuredImages:
    patches, rows = [], []
    for image in record.images:
        try:
            grid = measure.images.size(*measure.images.header(image))
            if measure.unreadable == "drop":
                measure.images.check(image)
        except ImageError as error:
            if measure.unreadable == "drop":
                nothing = np.empty(0, np.int64)
                return _MeasuredImages(nothing, nothing, False)
            raise DataError(
                f"{record.where}: image {image} cannot be used: {error}; "
                "correct the record, or leave such records out with IndexConfig(unreadable='drop')."
            ) from error
        patches.append(math.prod(grid))
        rows.append(measure.images.rows_of_features(*grid))
    return _MeasuredImages(np.asarray(patches, np.int64), np.asarray(rows, np.int64), True)


def cache_folders(path: Path) -> list[Path]:
    """Where to keep the index of a data file: beside it or, where that cannot be written, in the user's cache."""
    folders = [path.parent / ".flowtrain"]
    with suppress(RuntimeError):  # who runs in a container may have no home
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folders.append(home / "flowtrain" / _folder_name(path))
    return folders


def _folder_name(path: Path) -> str:
    """A name for the file's folder: a cache for several data folders keeps files of the same name apart."""
    return fingerprint(str(path.parent.resolve()))


def _cache_files(path: Path, measure: Measure, cache_dir: str | Path | None) -> list[Path]:
    folders = cache_folders(path) if cache_dir is None else [Path(cache_dir) / _folder_name(path)]
    return [folder / f"{path.name}.{measure.fingerprint}.npz" for folder in folders]


def _load(cache_file: Path, path: Path) -> IndexTable | None:
    try:
        with np.load(cache_file, allow_pickle=False) as file:
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
    """Whether a record can be used now that could not when the table was made: a folder is mounted since, say."""
    left_out = np.flatnonzero(~table.readable).tolist()
    records = (read(path, number, int(table.offsets[number]), int(table.lengths[number])) for number in left_out)
    with ThreadPoolExecutor() as threads:
        return any(found.usable for found in threads.map(lambda record: _measured_images(record, measure), records))


def _status(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _save(table: IndexTable, status: list[int], path: Path, cache_files: Iterable[Path]) -> None:
    arrays: dict[str, Any] = {
        "content": np.asarray(table.content),
        "status": np.asarray(status, dtype=np.int64),
        "offsets": table.offsets,
        "lengths": table.lengths,
        "readable": table.readable,
        **asdict(table.sizes),
    }
    for cache_file in cache_files:
        try:
            _write(cache_file, arrays)
            return
        except OSError as error:
            failure = error
    rank_zero_warn(
        f"The index of {path} could not be kept ({failure}), so every process measures it anew; "
        "name a folder that can be written: FlowDataModule(index=IndexConfig(cache_dir=...))."
    )


def _write(cache_file: Path, arrays: dict[str, Any]) -> None:
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=cache_file.parent, prefix=f".{cache_file.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)
        os.replace(temporary, cache_file)
    except BaseException:
        os.unlink(temporary)
        raise
