"""Records in a Parquet file: one a row, perhaps with images inside."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.data_path import is_local
from flowtrain_lightning.data.records.columns import Columns
from flowtrain_lightning.data.records.formats import Record, parse
from flowtrain_lightning.data.sources.data_file import DataFile
from flowtrain_lightning.data.sources.parts_of_file import PartsOfFile
from flowtrain_lightning.data.sources.record_store import Location
from flowtrain_lightning.data.sources.table_rows import row_as_record
from flowtrain_lightning.packing import IntArray

LARGE_GROUP = 128 * 2**20
"""Bytes of a row group from which on reading records in shuffled order is slow."""


class ParquetFile(DataFile):
    """A Parquet file. A location is a row group and the row in it.

    A group is read from its beginning up to the record (`RowPieces`), so a file that is read in shuffled order should
    have small ones. Paths of images are relative to the file's folder. What the file says of its groups is read when it
    is first needed: not by ranks that have sizes from the index, and records from the reader of their node.

    Raises:
        DataError: there is no such file, or pyarrow is not installed; when it is read, it is no Parquet file.
    """

    def __init__(self, path: Path, ignored: Collection[str] = (), columns: Columns | None = None) -> None:
        super().__init__(path, ignored, columns)
        _parquet()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}  # each process has its own

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.path.name

    def locate(self) -> Iterator[Location]:
        """The place of each record, in order."""
        for group in range(self._metadata.num_row_groups):
            for row in range(self._metadata.row_group(group).num_rows):
                yield group, row

    def lengths(self, locations: IntArray) -> IntArray:
        """``[records]`` how many bytes are read for each, of all rows of a group alike."""
        groups = (self._metadata.row_group(group) for group in range(self._metadata.num_row_groups))
        of_a_row = [group.total_byte_size // max(group.num_rows, 1) for group in groups]
        return np.asarray(of_a_row, np.int64)[locations[:, 0]]

    def records(self, first: int, locations: IntArray) -> list[Record]:
        """Records that follow each other.

        Raises:
            DataError: the file was changed, or a record cannot be understood.
        """
        if is_local(self.path):
            self.open().close()  # which refuses a file that has changed, whatever is kept of it
        found = []
        for number, (group, row) in enumerate(locations.tolist(), first):
            with _explained(self.path):
                fields = self._rows.row(group, row)
            found.append(parse(fields, self.path, number, self.path.parent.joinpath, self.ignored, self.columns))
        return found

    @cached_property
    def _metadata(self) -> Any:
        with self.open() as file, _explained(self.path):
            found = _parquet().ParquetFile(file).metadata
            groups = [found.row_group(group) for group in range(found.num_row_groups)]
            if found.num_rows != sum(group.num_rows for group in groups):
                raise ValueError("its row groups have other rows than it says")
        self._warn_of_large_groups(max((group.total_byte_size for group in groups), default=0))
        return found

    @cached_property
    def _rows(self) -> RowPieces:
        return RowPieces(self.open_for_parts, self._metadata)

    def _warn_of_large_groups(self, largest: int) -> None:
        if largest > LARGE_GROUP:
            rank_zero_warn(
                f"{self.path} has row groups of up to {largest / 2**20:,.0f} MiB. A record is found by reading its "
                "group from the beginning, so shuffled training will be slow. Write the file anew in small groups "
                "(row_group_size=100), or give what datasets.load_dataset makes of it, which can read single rows."
            )


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "Reading Parquet needs pyarrow; install it with: pip install 'flowtrain-lightning[data]'"
        ) from error
    return pyarrow.parquet


class _explained:
    """Turns what pyarrow raises into a sentence."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, (OSError, ValueError)) and not isinstance(error, DataError):  # pyarrow's own are both
            raise DataError(f"{self._path}: it is no Parquet file that can be read ({error}).") from error


PIECE_BYTES = 1 << 24
"""About so many bytes a piece has, of the rows as they lie in the file."""

_PIECE_ROWS = 1024
"""A piece has at most so many rows, since dictionaries make rows look small in the file."""

KEPT_BYTES = 1 << 27
"""That the pieces kept may have together, in memory."""

_READ_AHEAD = 1 << 20
"""Bytes of a column that are read at once."""


class _Course(NamedTuple):
    """A row group that is being read.

    Attributes:
        group: its number.
        process: that reads it; a fork shares the place in the file with it, and so may not go on.
        pieces: those that were not read yet.
    """

    group: int
    process: int
    pieces: Iterator[Any]


class _Kept(NamedTuple):
    """A piece in memory, and its bytes there."""

    rows: Any
    size: int


class RowPieces:
    """The rows of a Parquet file, in pieces of which the last used are kept.

    A Parquet file cannot be entered within a row group: to find a row, its group is decoded from the beginning, or from
    where the last one that was asked for lies. What stands before it is let go of.

    Args:
        open_file: opens the file.
        metadata: pyarrow's, of the file.
    """

    def __init__(self, open_file: Callable[[], BinaryIO | PartsOfFile], metadata: Any) -> None:
        self._open_file = open_file
        self._metadata = metadata
        self._course: _Course | None = None
        self._next = 0
        self._kept: OrderedDict[tuple[int, int], _Kept] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def row(self, group: int, row: int) -> dict[str, Any]:
        """A row as a record.

        Args:
            group: the row group.
            row: its number in the group.
        """
        number, within = divmod(row, self._rows_of_a_piece(group))
        with self._lock:
            piece = self._piece(group, number)
        return row_as_record(piece.slice(within, 1).to_pylist()[0])

    def _rows_of_a_piece(self, group: int) -> int:
        found = self._metadata.row_group(group)
        fitting = found.num_rows * PIECE_BYTES // max(found.total_byte_size, 1)
        return int(min(max(fitting, 1), _PIECE_ROWS))

    def _piece(self, group: int, number: int) -> Any:
        if (group, number) not in self._kept:
            course = self._course
            if course is None or course[:2] != (group, os.getpid()) or self._next > number:
                self._course, self._next = self._begun(group), 0
            self._read_to(number)
        self._kept.move_to_end((group, number))
        return self._kept[group, number].rows

    def _read_to(self, number: int) -> None:
        """Reads on to a piece, this one included."""
        assert self._course is not None, "it was begun"
        for rows in islice(self._course.pieces, number + 1 - self._next):
            key = self._course.group, self._next
            self._next += 1
            self._size += rows.nbytes - (self._kept.pop(key).size if key in self._kept else 0)
            self._kept[key] = _Kept(rows, rows.nbytes)
            while self._size > KEPT_BYTES and len(self._kept) > 1:
                self._size -= self._kept.popitem(last=False)[1].size
        if self._next <= number:
            raise ValueError(f"row group {self._course.group} has fewer rows than the file says")

    def _begun(self, group: int) -> _Course:
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(
            self._open_file(),
            metadata=self._metadata,
            pre_buffer=False,
            buffer_size=_READ_AHEAD,
            page_checksum_verification=True,
        )
        rows = self._rows_of_a_piece(group)
        batches = file.iter_batches(batch_size=rows, row_groups=[group])
        return _Course(group, os.getpid(), _of_equal_length(batches, rows))


def _of_equal_length(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """Tables of so many rows, but for the last: pyarrow may give fewer where a column's data end."""
    import pyarrow

    held: list[Any] = []
    for batch in batches:
        held.append(pyarrow.Table.from_batches([batch]))
        while sum(table.num_rows for table in held) >= rows:
            joined = pyarrow.concat_tables(held)
            yield joined.slice(0, rows)
            held = [joined.slice(rows)] if joined.num_rows > rows else []
    if held:
        yield pyarrow.concat_tables(held)
