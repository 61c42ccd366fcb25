"""Records in a data set of Hugging Face's ``datasets``: one a row, perhaps with images inside."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.records.columns import Columns
from flowtrain_lightning.data.records.formats import Record, parse
from flowtrain_lightning.data.sources.record_store import Location
from flowtrain_lightning.data.sources.table_rows import row_as_record
from flowtrain_lightning.packing import IntArray

_HASHED_ROWS = 1000

_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
"""With which a stream of Arrow's ends."""


@dataclass(frozen=True)
class HubDataset:
    """A data set by its name, for configuration files; what ``datasets.load_dataset`` takes.

    Attributes:
        name: on the Hugging Face Hub, or a local folder, also one that ``save_to_disk`` wrote.
        split: which part of it.
        config: which of its configurations; None takes its only one.
        streaming: read it in order while training, without a copy on disk.
    """

    name: str
    split: str = "train"
    config: str | None = None
    streaming: bool = False

    def load(self) -> Any:
        """A ``datasets.Dataset``, or a ``datasets.IterableDataset`` where it streams.

        Raises:
            DataError: ``datasets`` is not installed, or cannot load it.
        """
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"{self.name}: a data set of the Hub needs datasets; install it with: "
                "pip install 'flowtrain-lightning[data]'"
            ) from error
        try:
            if is_saved(self.name):
                return self._of_saved(datasets.load_from_disk(self.name))
            return datasets.load_dataset(self.name, self.config, split=self.split, streaming=self.streaming)
        except Exception as error:  # whatever the network, the Hub or a builder raises
            raise DataError(f"{self.name}: it cannot be loaded ({type(error).__name__}: {error}).") from error

    def _of_saved(self, found: Any) -> Any:
        """The split that is asked for."""
        if isinstance(found, Mapping):
            if self.split not in found:
                raise ValueError(f"it has no split {self.split!r}, but {', '.join(found)}")
            found = found[self.split]
        return found.to_iterable_dataset() if self.streaming else found


def is_saved(name: str | Path) -> bool:
    """Whether it is a folder that a data set of Hugging Face or several splits were saved to."""
    return any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))


def _refuse_cut(path: Path) -> None:
    """Arrow's reader takes the end of a file, and zeros in it, for the end of its rows.

    Raises:
        DataError: its rows end before the file does, or without the mark of their end.
    """
    import pyarrow

    if not path.is_file():
        return
    try:
        with pyarrow.memory_map(str(path)) as file:
            rows = sum(batch.num_rows for batch in pyarrow.ipc.open_stream(file))  # which reads where they lie alone
            end = file.tell()
            file.seek(max(file.size() - len(_ARROW_END), 0))
            whole = end == file.size() and file.read() == _ARROW_END
    except (OSError, ValueError) as error:  # pyarrow's own are both
        raise DataError(f"{path}: it is no Arrow file that can be read ({error}).") from error
    if not whole:
        raise DataError(
            f"{path}: it was cut or damaged: behind {rows} rows there is not the mark of their end, so rows may be "
            "missing. Copy the folder again, or save or load the data set anew."
        )


class HuggingFaceRows:
    """The rows of a ``datasets.Dataset``. A location is the row's number, and 0.

    Images stay the bytes that they are; whatever format the data set is set to does not count.

    Args:
        dataset: the data set.
        ignored: columns that are as if they were not there.
        columns: which hold a question and an answer, where rows have none of the usual forms.

    Raises:
        DataError: its rows are changed when they are read, which would be passed over; or one of its files was cut.
    """

    def __init__(self, dataset: Any, ignored: Collection[str] = (), columns: Columns | None = None) -> None:
        if dataset.format["type"] == "custom":
            raise DataError(
                "The data set has a transform of its own (with_transform), which is not called here: rows are read as "
                "they lie. Change them by dataset.map(...), and images by FlowDataModule(augment=...)."
            )
        for file in dataset.cache_files:
            _refuse_cut(Path(file["filename"]))
        self._rows = dataset.with_format("arrow")
        self._ignored = ignored
        self._columns = columns
        self._first: str | None = None

    @property
    def name(self) -> str:
        """Its name in messages."""
        info = self._rows.info
        return f"data set {info.dataset_name or self._identity}" + (f", {self._rows.split}" if self._rows.split else "")

    @property
    def path(self) -> Path:
        """In no folder that exists, so that its index goes to the user's cache."""
        return Path("/data sets of Hugging Face") / self._identity

    @property
    def _identity(self) -> str:
        # Not public, but what the manual of `datasets` tells to look at: it changes with every change of the rows.
        return str(self._rows._fingerprint)

    def locate(self) -> Iterator[Location]:
        """The place of each record, in order."""
        return ((row, 0) for row in range(len(self._rows)))

    def lengths(self, locations: IntArray) -> IntArray:
        """``[records]`` how many bytes are read for each, of all rows alike."""
        table = self._rows.data
        return np.full(len(locations), table.nbytes // max(len(table), 1), np.int64)

    def records(self, first: int, locations: IntArray) -> list[Record]:
        """Records that follow each other.

        Raises:
            DataError: a record cannot be understood.
        """
        if len(locations) == 0:
            return []
        rows = locations[:, 0]
        found = self._rows[int(rows[0]) : int(rows[-1]) + 1].to_pylist()
        how = self._ignored, self._columns
        return [parse(row_as_record(row), self.name, number, Path, *how) for number, row in enumerate(found, first)]

    def status(self) -> list[int]:
        """Numbers that change when the rows do."""
        return [len(self._rows), int(fingerprint(self._identity)[:12], 16)]

    def content(self) -> str:
        """The fingerprint of all rows."""
        import pyarrow

        digest = hashlib.blake2b(digest_size=12)
        for start in range(0, len(self._rows), _HASHED_ROWS):
            table = self._rows[start : start + _HASHED_ROWS].combine_chunks()
            sink = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, table.schema.remove_metadata()) as writer:
                writer.write_table(table.replace_schema_metadata(None))
            digest.update(sink.getvalue())
        return digest.hexdigest()

    def hold(self, content: str) -> None:
        """A ``Dataset`` never changes, so there is nothing to refuse."""
