"""Named tensors in a folder, written by several ranks together and read by any number (torch.distributed.checkpoint).

torch.distributed.checkpoint keeps its index of a folder (``.metadata``) as a pickle, and reading a pickle may run
code. So an index in JSON is written beside it, and only that is ever read here; the tensors themselves are read with
``weights_only=True``. The folder stays one that torch's own tools understand.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (  # type: ignore[attr-defined]
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    load,
    save,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from flowtrain_lightning.checkpoint.files import OtherRankFailed

INDEX = "index.json"


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a folder of tensors. All ranks of the default group call it; what several hold is written once.

    Raises:
        Exception: what this rank met.
        OtherRankFailed: only other ranks met something.
    """
    try:
        save(dict(tensors), storage_writer=_Writer(folder))
    except CheckpointException as error:  # all ranks get it, with the errors of those that failed
        own = error.failures.get(dist.get_rank() if dist.is_initialized() else 0)
        if own is None:
            raise OtherRankFailed(f"Another rank failed to write its part of {folder}.") from error
        raise own[0] from error


def load_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a folder whose names are ``wanted``, whole and on the CPU, for this rank alone."""
    reader = _Reader(folder)
    tensors: dict[str, Any] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        if wanted(name):
            assert isinstance(stored, TensorStorageMetadata)
            tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    if tensors:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as was asked for
            load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@dataclass(frozen=True)
class _Chunk:
    """Where a part of a tensor lies; the fields that ``FileSystemReader`` asks for have its names."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    relative_path: str
    offset: int
    length: int
    transform_descriptors: ClassVar[None] = None


class _Writer(FileSystemWriter):
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {result.index: result.storage_data for written in results for result in written}
        index: dict[str, Any] = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            chunks = []
            for chunk in stored.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                chunks.append(
                    _Chunk(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length)
                )
            index[name] = {
                "dtype": str(stored.properties.dtype).removeprefix("torch."),
                "shape": list(stored.size),
                "chunks": [asdict(chunk) for chunk in chunks],
            }
        with (Path(self.path) / INDEX).open("w") as file:
            json.dump(index, file)
            file.flush()
            os.fsync(file.fileno())


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = json.loads((Path(self.path) / INDEX).read_text())
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _Chunk] = {}
        for name, stored in index.items():
            chunks = [_Chunk(**chunk) for chunk in stored["chunks"]]
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, stored["dtype"])),
                torch.Size(stored["shape"]),
                [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in chunks],
            )
            places |= {MetadataIndex(name, chunk.offsets): chunk for chunk in chunks}
        return Metadata(tensors, storage_data=places)
