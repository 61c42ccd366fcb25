"""Row groups of a Parquet file, read forward a piece at a time, so that large ones need little memory."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

PIECE_BYTES = 1 << 24
"""About so many bytes a piece has, of the rows as they lie in the file."""

_PIECE_ROWS = 1024
"""A piece has at most so many rows, since dictionaries make rows look small in the file."""

_KEPT_BYTES = 1 << 27
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

    def __init__(self, open_file: Callable[[], BinaryIO], metadata: Any) -> None:
        self._open_file = open_file
        self._metadata = metadata
        self._course: _Course | None = None
        self._next = 0
        self._kept: OrderedDict[tuple[int, int], _Kept] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def row(self, group: int, row: int) -> dict[str, Any]:
        """A row as Python's values.

        Args:
            group: the row group.
            row: its number in the group.
        """
        number, within = divmod(row, self._rows_of_a_piece(group))
        with self._lock:
            piece = self._piece(group, number)
        fields: dict[str, Any] = piece.slice(within, 1).to_pylist()[0]
        return fields

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
            while self._size > _KEPT_BYTES and len(self._kept) > 1:
                self._size -= self._kept.popitem(last=False)[1].size
        if self._next <= number:
            raise ValueError(f"row group {self._course.group} has fewer rows than the file says")

    def _begun(self, group: int) -> _Course:
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(
            self._open_file(), metadata=self._metadata, pre_buffer=False, buffer_size=_READ_AHEAD
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
