"""Records in a Parquet file: one a row, perhaps with images inside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.formats import Record, parse
from flowtrain_lightning.data.sources.data_file import DataFile
from flowtrain_lightning.data.sources.record_store import Location
from flowtrain_lightning.data.sources.row_pieces import RowPieces
from flowtrain_lightning.packing import IntArray

_LARGE_GROUP = 128 * 2**20
"""Bytes of a row group from which on reading records in shuffled order is slow."""


class ParquetFile(DataFile):
    """A Parquet file. A location is a row group and the row in it.

    A group is read from its beginning up to the record (`RowPieces`), so a file that is read in shuffled order should
    have small ones. Paths of images are relative to the file's folder.

    Raises:
        DataError: there is no such file, it is no Parquet file, or pyarrow is not installed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with self.open() as file, _explained(path):
            self._metadata: Any = _parquet().ParquetFile(file).metadata
        self._warn_of_large_groups()
        self._rows = RowPieces(self.open, self._metadata)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.path.name

    @property
    def place(self) -> Path:
        """The path beside which its index is kept."""
        return self.path

    def locate(self) -> Iterator[Location]:
        """Where each record lies."""
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
        self.open().close()  # which refuses a file that has changed, whatever is kept of it
        found = []
        for number, (group, row) in enumerate(locations.tolist(), first):
            with _explained(self.path):
                fields = self._rows.row(group, row)
            found.append(parse(fields, self.path, number, self.path.parent.joinpath))
        return found

    def _warn_of_large_groups(self) -> None:
        groups = range(self._metadata.num_row_groups)
        largest = max((self._metadata.row_group(group).total_byte_size for group in groups), default=0)
        if largest > _LARGE_GROUP:
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
