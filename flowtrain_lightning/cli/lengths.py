"""Reads the lengths of samples from a Parquet file, for the commands that plan and pack them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flowtrain_lightning.cli.configuration import UsageError
from flowtrain_lightning.packing import IntArray

if TYPE_CHECKING:
    import pyarrow


def read_lengths(path: Path) -> tuple[IntArray, pyarrow.Table]:
    """The tokens of every sample, and the whole table, of which other columns may be asked.

    Raises:
        UsageError: pyarrow is not installed, or the file holds no table with a column ``tokens`` of whole numbers.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            "reading Parquet needs pyarrow; install it with `pip install flowtrain-lightning[pack]`."
        ) from error
    if not path.is_file():
        raise UsageError(f"there is no file {path}.")
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path} is no Parquet file that can be read: {error}") from error
    if "tokens" not in table.column_names:
        raise UsageError(
            f"{path} has no column 'tokens' (its columns: {', '.join(table.column_names) or 'none'}); it must hold the "
            "tokens of each sample."
        )
    column = table["tokens"].combine_chunks()
    if not pyarrow.types.is_integer(column.type) or column.null_count:
        raise UsageError(f"The column 'tokens' of {path} must hold whole numbers, none missing.")
    return column.to_numpy(zero_copy_only=False).astype(np.int64), table
