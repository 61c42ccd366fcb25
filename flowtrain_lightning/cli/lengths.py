"""Reads the lengths of samples and of their media items from a Parquet file, for commands that plan and pack them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flowtrain_lightning.cli.command_table import UsageError
from flowtrain_lightning.packing import IMAGE, IntArray, SampleSizes
from flowtrain_lightning.packing.listed_media import ListedMedia, sizes_of_listed

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
            "reading Parquet needs pyarrow; install it with: pip install 'flowtrain-lightning[pack]'"
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


def read_sizes(path: Path, modalities: Sequence[str] = ()) -> SampleSizes:
    """Sizes of samples; without a column of media no sample has any.

    The media items of several modalities are in a column each, ``image_tokens``, ``audio_tokens`` …; those of a lone
    encoder in the column of lists whose name ends in ``_tokens``, where one of numbers (``text_tokens``) is not read.
    See `sizes_of_listed` for what a file does not say.

    Args:
        path: of the file.
        modalities: what encoders take, where there are several.

    Raises:
        UsageError: two columns list media items for a lone encoder, a modality has none, or a column cannot be used.
    """
    tokens, table = read_lengths(path)
    if len(modalities) > 1:
        return sizes_of_listed(
            tokens, {name: _listed(table, media_column(table, name, path), path) for name in modalities}
        )
    counted = [name for name in table.column_names if name.endswith("_tokens")]
    listed = [name for name in counted if _is_list(table[name].type)]
    if len(listed) > 1:
        raise UsageError(
            f"{path} lists media in the columns {' and '.join(map(repr, listed))}, but there is one encoder; leave "
            "only the column of its media."
        )
    name = next(iter(listed or counted), None)
    return sizes_of_listed(tokens, {} if name is None else {IMAGE: _listed(table, name, path)})


def media_column(table: pyarrow.Table, modality: str, path: Path, *others: str) -> str:
    """The name of the column that lists the lengths of a modality's media items.

    Args:
        table: of the file.
        modality: of the media items.
        path: of the file.
        others: names that will do as well.

    Raises:
        UsageError: the file has none.
    """
    names = (f"{modality}_tokens", *others)
    column = next((name for name in names if name in table.column_names), None)
    if column is None:
        raise UsageError(
            f"{path} has no column {' or '.join(map(repr, names))} (its columns: {', '.join(table.column_names)}); "
            f"it must list the encoder tokens of each sample's {modality} media."
        )
    return column


def _listed(table: pyarrow.Table, column: str, path: Path) -> ListedMedia:
    patches = media_lengths(table[column], path, column)  # which refuses what holds no lists
    start = media_start(table[column])
    return ListedMedia(start, patches, media_content(table, column.removesuffix("_tokens"), start, path))


def media_content(table: pyarrow.Table, modality: str, start: IntArray, path: Path) -> IntArray | None:
    """``[items]`` equal numbers for equal media items of a modality, -1 where it is not known; None without a column.

    The column ``<modality>_content`` lists them like the items' lengths.

    Args:
        table: of the file.
        modality: as in the name of the column of lengths.
        start: ``[samples + 1]`` the media items of sample ``i`` are ``start[i]:start[i + 1]``.
        path: of the file.

    Raises:
        UsageError: the column does not hold lists of whole numbers, or not one for each media item.
    """
    name = f"{modality}_content"
    if name not in table.column_names:
        return None
    import pyarrow.compute

    whole, integers = table[name].combine_chunks(), (pyarrow.types.is_integer, pyarrow.types.is_null)
    if not _is_list(whole.type) or not any(holds(whole.type.value_type) for holds in integers):
        raise UsageError(f"The column {name!r} of {path} must hold lists of whole numbers, but holds {whole.type}.")
    if (unlike := np.flatnonzero(_counts(whole) != np.diff(start))).size:
        sample = unlike[0]
        raise UsageError(
            f"The column {name!r} of {path} must list a number for every media item, but of sample {sample} it lists "
            f"{_counts(whole)[sample]} for {np.diff(start)[sample]}."
        )
    numbers: IntArray = whole.flatten().cast(pyarrow.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    return numbers


def _counts(lists: pyarrow.ListArray) -> IntArray:
    import pyarrow.compute

    counts = pyarrow.compute.fill_null(pyarrow.compute.list_value_length(lists), 0)
    found: IntArray = counts.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def media_start(column: pyarrow.ChunkedArray) -> IntArray:
    """``[samples + 1]`` where the media items of each sample begin in what a column of lists has in all."""
    return np.concatenate([[0], np.cumsum(_counts(column.combine_chunks()))]).astype(np.int64)


def media_lengths(column: pyarrow.ChunkedArray, path: Path, name: str) -> IntArray:
    """``[items]`` lengths of all media items that a column lists, sample by sample.

    Raises:
        UsageError: the column does not hold lists of whole numbers, or one is missing or negative.
    """
    import pyarrow.compute

    whole = column.combine_chunks()
    if _is_list(whole.type) and pyarrow.types.is_null(whole.type.value_type) and not len(whole.flatten()):
        return np.empty(0, dtype=np.int64)  # as tables are written in which no sample has media
    if not _is_list(whole.type) or not pyarrow.types.is_integer(whole.type.value_type):
        raise UsageError(f"The column {name!r} of {path} must hold lists of whole numbers, but holds {whole.type}.")
    values = whole.flatten()
    lengths: IntArray = values.cast(pyarrow.int64(), safe=False).fill_null(-1).to_numpy(zero_copy_only=False)
    if (wrong := np.flatnonzero(lengths < 0)).size:
        sample = pyarrow.compute.list_parent_indices(whole)[wrong[0]]
        raise UsageError(
            f"The column {name!r} of {path} must list whole numbers of at least 0, none missing, but "
            f"sample {sample} has {values[wrong[0]]}."
        )
    return lengths


def _is_list(kind: pyarrow.DataType) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind))
