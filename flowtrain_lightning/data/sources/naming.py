"""Names of data, and the stores of records that they mean."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.data_path import data_path
from flowtrain_lightning.data.records.columns import Columns
from flowtrain_lightning.data.sources.hugging_face import HubDataset, HuggingFaceRows, is_saved
from flowtrain_lightning.data.sources.json_file import JsonFile
from flowtrain_lightning.data.sources.parquet_file import ParquetFile
from flowtrain_lightning.data.sources.record_store import RecordStore
from flowtrain_lightning.data.sources.tar_shard import TarShard

_Opener = Callable[[Path, Collection[str], Columns | None], RecordStore]

_KINDS: dict[str, _Opener] = {".parquet": ParquetFile, ".tar": TarShard}
"""Endings of files that are not JSON."""

_COMPRESSED = (
    ".7z", ".br", ".bz2", ".gz", ".lz4", ".lzma", ".snappy", ".tbz", ".tbz2", ".tgz", ".txz", ".tzst", ".xz", ".z",
    ".zip", ".zst", ".zstd",
)  # fmt: skip
_TABLES = {".arrow": "'arrow'", ".csv": "'csv'", ".tsv": "'csv', sep='\\t'"}
"""Endings of files that are not read, and with which arguments ``datasets.load_dataset`` reads them."""


@dataclass(frozen=True)
class Mixture:
    """Several sources of samples as one.

    Attributes:
        sources: each a file, a pattern of files such as ``"shards/*.tar"``, an address, a :class:`HubDataset` or a
            ``datasets.Dataset``.
        weights: the share of an epoch's samples that each source gives; None follows ``temperature``.
        temperature: a source gives samples in proportion to its length to the power of ``1 / temperature``: 1 follows
            the lengths, above it small sources are seen more often. None takes every sample once an epoch.
    """

    sources: Sequence[Any]
    weights: Sequence[float] | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and self.temperature is not None:
            raise DataError("A mixture got weights and a temperature; give one of them.")
        if self.weights is not None and len(self.weights) != len(self.sources):
            raise DataError(
                f"A mixture got {len(self.weights)} weights for {len(self.sources)} sources; give one for each."
            )
        if self.temperature is not None and not 0 < self.temperature < inf:
            raise DataError(f"A mixture got temperature={self.temperature}; it must be a number above 0.")
        for weight in self.weights or ():
            _refuse_no_number(weight)

    @property
    def weighted(self) -> bool:
        """Sources give other shares than their lengths."""
        return self.weights is not None or self.temperature is not None

    def shares(self, lengths: Sequence[Sequence[int]]) -> tuple[float, ...] | None:
        """The weight of each store, in proportion to its length among those of the same source; None without weights.

        Args:
            lengths: samples of every store, for each source.
        """
        totals = [sum(of_source) for of_source in lengths]
        if self.temperature is not None:
            weights = [float(total) ** (1 / self.temperature) for total in totals]
        elif self.weights is not None:
            weights = [float(weight) for weight in self.weights]
        else:
            return None
        return tuple(
            weight * (length / total)
            for weight, total, of_source in zip(weights, totals, lengths, strict=True)
            for length in of_source
        )


def _refuse_no_number(weight: Any) -> None:
    with suppress(TypeError, ValueError):
        if isfinite(float(weight)):
            return
    raise DataError(f"A mixture got the weight {weight!r}; give each source a number.")


Data = str | Path | HubDataset | Mixture | Mapping[str, float] | Sequence[str | Path] | Any
"""Data as a user names them: a source, a list of several, a mapping of sources to weights, or a :class:`Mixture`."""


def mixture_of(stage: str, given: Any) -> Mixture:
    """Make a mixture, of one source or several, of the data that a user gave for a stage.

    Raises:
        DataError: there is none, or sources have weights in a stage that does not train.
    """
    if isinstance(given, Mapping) and any(hasattr(split, "with_format") for split in given.values()):
        splits = ", ".join(map(str, given))
        raise DataError(f"{stage} is a {type(given).__name__} of several splits; give one of them: {splits}.")
    if isinstance(given, Mixture):
        mixture = given
    elif isinstance(given, Mapping):
        mixture = Mixture(list(given), weights=tuple(given.values()))
    elif isinstance(given, list | tuple):
        mixture = Mixture(list(given))
    else:
        mixture = Mixture([given])
    if not mixture.sources:
        raise DataError(f"{stage} is an empty list of files; name at least one, or leave the argument out.")
    if mixture.weighted and stage != "train":
        raise DataError(f"{stage} gives files weights, which only train may have; give a list of files.")
    return mixture


def is_stream(source: Any) -> bool:
    """Whether it can be read in order only."""
    return hasattr(source, "__iter__") and not hasattr(source, "__len__") and not isinstance(source, str | Path)


def open_stores(source: Any, ignored: Collection[str] = (), columns: Columns | None = None) -> list[RecordStore]:
    """The stores of one source.

    Args:
        source: what a user names.
        ignored: fields of records that are as if they were not there.
        columns: which fields hold a question and an answer, where records have none of the usual forms.

    Raises:
        DataError: it is nothing of the kinds that :class:`Mixture` lists, or cannot be opened.
    """
    if isinstance(source, HubDataset):
        source = source.load()
    if isinstance(source, str | Path) and is_saved(source):
        source = HubDataset(str(source)).load()
    if isinstance(source, str | Path):
        return [_opened(path, ignored, columns) for path in _files(data_path(source))]
    if hasattr(source, "with_format") and hasattr(source, "__len__"):
        return [HuggingFaceRows(source, ignored, columns)]
    if isinstance(source, Mapping):
        raise DataError(
            "A record is no data by itself. Write records into a file, one a line, or make a data set of them: "
            "datasets.Dataset.from_list(records)."
        )
    raise DataError(
        f"{type(source).__name__} is no data that can be read; give a file, an address, a HubDataset, a "
        "datasets.Dataset, or a stream (docs/data.md shows how rows that are found by their number become one)."
    )


def _opened(path: Path, ignored: Collection[str], columns: Columns | None) -> RecordStore:
    ending = path.suffix.lower()
    if ending in _COMPRESSED and path.is_file():
        raise DataError(f"{path}: it is compressed, but records are read at their places in a file; unpack it first.")
    if ending in _TABLES and path.is_file():
        raise DataError(
            f"{path}: files of this kind are not read. Load it with datasets.load_dataset({_TABLES[ending]}, "
            "data_files=...), make its rows such records as docs/data.md shows, by map, and give what comes of it."
        )
    return _KINDS.get(ending, JsonFile)(path, ignored, columns)


def _files(path: Path) -> list[Path]:
    """The file of this path, or all that it matches, by name."""
    if "*" not in path.name or path.is_file():
        return [path]
    found = sorted(path.parent.glob(path.name), key=str)
    if not found:
        raise DataError(f"{path}: no file matches this pattern.")
    return found
