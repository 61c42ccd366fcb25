"""What ``flowtrain plan`` reads: a module, a device and the lengths of data, from names and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml  # type: ignore[import-untyped]

from flowtrain_lightning.allocator import (
    Device,
    ModuleDescription,
    PlanningError,
    Workload,
    describe_config,
    describe_dimensions,
    device_from,
    named_device,
    named_model,
    typical_workload,
)
from flowtrain_lightning.allocator.flops import IntArray
from flowtrain_lightning.cli.lengths import read_lengths
from flowtrain_lightning.packing import SampleSizes

if TYPE_CHECKING:
    import pyarrow


def read_module(name: str) -> ModuleDescription:
    """A module by its public name, from a Hugging Face ``config.json``, or from a YAML file of dimensions."""
    if Path(name).suffix == ".json":
        return describe_config(_content(Path(name)), Path(name).stem)
    if Path(name).suffix in (".yaml", ".yml"):
        return describe_dimensions({"name": Path(name).stem, **_content(Path(name))})
    return named_model(name)


def read_device(name: str) -> Device:
    """A known device, or one that a YAML file describes."""
    if Path(name).suffix in (".yaml", ".yml"):
        return device_from({"name": Path(name).stem, **_content(Path(name))})
    return named_device(name)


def read_workload(path: Path | None, module: ModuleDescription, settings: Mapping[str, int]) -> Workload:
    """Lengths from a Parquet file, or typical ones where there is none.

    The file has a row per sample: ``tokens``, and for every modality a list of its media's encoder tokens (patches,
    frames): ``image_tokens``, ``audio_tokens`` …; ``media_tokens`` where the module has one encoder.
    """
    if path is None:
        return typical_workload(module, **settings)
    tokens, table = read_lengths(path)
    media = {}
    for modality in module.encoders:
        names = (f"{modality}_tokens", *(("media_tokens",) if len(module.encoders) == 1 else ()))
        column = next((name for name in names if name in table.column_names), None)
        if column is None:
            raise PlanningError(
                f"{path} has no column {' or '.join(map(repr, names))} (its columns: {', '.join(table.column_names)}); "
                f"it must list the encoder tokens of each sample's {modality} media."
            )
        media[modality] = _lengths(table[column], path, column)
    return Workload(tokens, media, **settings)


def read_sizes(path: Path) -> SampleSizes:
    """Sizes of samples with one modality, from such a file; without a column for media no sample has any.

    Media are in the column of lists whose name ends in ``_tokens``; one of numbers (``text_tokens``) is not read.
    The file says nothing of target tokens and rows of features: all tokens, and a row for every patch, stand for them.
    """
    tokens, table = read_lengths(path)
    counted = [name for name in table.column_names if name.endswith("_tokens")]
    listed = [name for name in counted if _is_list(table[name].type)]
    if len(listed) > 1:
        raise PlanningError(
            f"{path} lists media in the columns {' and '.join(map(repr, listed))}, but a profile has one encoder; "
            "leave only the column of its media."
        )
    name = next(iter(listed or counted), None)
    if name is None:
        nothing = np.empty(0, dtype=np.int64)
        return SampleSizes(tokens, tokens, np.zeros(len(tokens) + 1, dtype=np.int64), nothing, nothing)
    import pyarrow.compute

    patches = _lengths(table[name], path, name)
    counts = pyarrow.compute.fill_null(pyarrow.compute.list_value_length(table[name].combine_chunks()), 0)
    start = np.concatenate([[0], np.cumsum(counts.to_numpy(zero_copy_only=False))]).astype(np.int64)
    return SampleSizes(tokens, tokens, start, patches, patches)


def _content(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PlanningError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise PlanningError(f"{path} must hold names with values, but holds {type(content).__name__}.")
    return content


def _is_list(kind: pyarrow.DataType) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind))


def _lengths(column: pyarrow.ChunkedArray, path: Path, name: str) -> IntArray:
    import pyarrow.compute

    whole = column.combine_chunks()
    if not _is_list(whole.type) or not pyarrow.types.is_integer(whole.type.value_type):
        raise PlanningError(f"The column {name!r} of {path} must hold lists of whole numbers, but holds {whole.type}.")
    values = whole.flatten()
    lengths: IntArray = values.cast(pyarrow.int64(), safe=False).fill_null(-1).to_numpy(zero_copy_only=False)
    if (wrong := np.flatnonzero(lengths < 0)).size:
        row = pyarrow.compute.list_parent_indices(whole)[wrong[0]]
        raise PlanningError(
            f"The column {name!r} of {path} must list whole numbers of at least 0, none missing, but row {row} lists "
            f"{values[wrong[0]]}."
        )
    return lengths
