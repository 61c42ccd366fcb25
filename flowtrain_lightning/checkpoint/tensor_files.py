"""The tensors of a checkpoint in safetensors files: each rank writes its own part, and reads what it holds.

A rank's part of a tensor is stored in pieces of at most ``PIECE_BYTES``, each with its digest. Who reads checks every
piece that it touches, so a rank of another layout reads and checks little more than what it wants.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from flowtrain_lightning.checkpoint.checkpoint_index import Index, Piece, StoredFile, StoredTensor, piece_key
from flowtrain_lightning.checkpoint.digest import DIGEST_THREADS, digest_of, tensor_digest
from flowtrain_lightning.checkpoint.files import take_usual_mode
from flowtrain_lightning.checkpoint.index_file import DamagedCheckpointError
from flowtrain_lightning.checkpoint.local_shard import LocalShard
from flowtrain_lightning.parallel.gradients import local_part
from flowtrain_lightning.parallel.regions import ElementRun, Region, local_region

PIECE_BYTES = 64 << 20

_HEADER_LENGTH = 8  # bytes before the header of a safetensors file that tell how long it is

# ---- writing --------------------------------------------------------------------------------------------------------


def can_store(value: Any) -> bool:
    """Whether a value is a tensor of a kind that safetensors files hold."""
    tensor = value.part if isinstance(value, LocalShard | ElementRun) else value
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and _knows(tensor.dtype)


@functools.cache
def _knows(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, RuntimeError):
        return False
    return True


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor | LocalShard | ElementRun]) -> Index:
    """Writes this rank's parts of tensors into one file, which is on the disk when this returns.

    In host memory lies as much as the rank writes.

    Args:
        folder: of the checkpoint.
        name: of the file, relative to the folder; where there are no numbers to write there is none.
        tensors: by key; plain ones are written whole, others in the part that this rank holds.

    Returns:
        the rank's part of the index.

    Raises:
        OSError: the file cannot be written.
        ValueError: see :func:`~.regions.local_region`.
    """
    written: dict[str, Tensor] = {}
    stored: dict[str, list[Region]] = {}
    dtypes: dict[str, torch.dtype] = {}
    storages: set[int] = set()
    for key, tensor in tensors.items():
        stored[key] = []
        for region, local in _boxes(tensor):
            part = _on_cpu(local, storages)
            blocks = list(region.split(PIECE_BYTES // part.itemsize)) if region.elements else []
            dtypes[key] = part.dtype
            written |= {piece_key(key, block): part[block.within(region)] for block in blocks}
            stored[key] += blocks
    digests = _digests(written)
    index = Index()
    for key, blocks in stored.items():
        pieces = tuple(Piece(block, name, digests[piece_key(key, block)]) for block in blocks)
        index.tensors[key] = StoredTensor(dtypes[key], tuple(tensors[key].shape), pieces)
    if written:
        path = folder / name
        _write_safetensors(path, written)
        index.files[name] = StoredFile(path.stat().st_size, _header_digest(path))
    return index


def _boxes(tensor: Tensor | LocalShard | ElementRun) -> Iterable[tuple[Region, Tensor]]:
    """Returns the place of this rank's part of a tensor, and its numbers."""
    match tensor:
        case ElementRun():
            return tensor.boxes
        case LocalShard():
            return [(tensor.region, tensor.part)]
        case _:
            return [(local_region(tensor), local_part(tensor))]


def _on_cpu(local: Tensor, storages: set[int]) -> Tensor:
    """Makes a part contiguous. One that shares memory, such as a tied weight, gets a copy, as safetensors asks."""
    part = local.detach().cpu().contiguous()
    storage = part.untyped_storage().data_ptr()
    if storage in storages:
        return part.clone()
    storages.add(storage)
    return part


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        return dict(zip(tensors, threads.map(tensor_digest, tensors.values()), strict=True))


def _write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))  # it has no type of its own for what the system says
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    take_usual_mode(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = file.read(_HEADER_LENGTH)
        return digest_of(length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size)))


# ---- reading --------------------------------------------------------------------------------------------------------


def read_tensors(folder: Path, index: Index, wanted: Mapping[str, Region]) -> dict[str, Tensor]:
    """Reads a region of each tensor, on the CPU.

    Beside the result, host memory holds ``DIGEST_THREADS`` pieces at most.

    Args:
        folder: of the checkpoint.
        index: of the checkpoint.
        wanted: key -> what to read of it.

    Raises:
        DamagedCheckpointError: names file and tensor.
    """
    touched = {
        key: [p for p in index.tensors[key].pieces if p.region.overlap(region)] for key, region in wanted.items()
    }
    files = {piece.file for pieces in touched.values() for piece in pieces}
    handles = {name: _open(folder / name, index.files[name], keys) for name, keys in _keys(index, files).items()}

    def read(key: str) -> Tensor:
        return _read_region(folder, handles, key, index.tensors[key], touched[key], wanted[key])

    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        return dict(zip(wanted, threads.map(read, wanted), strict=True))


def _keys(index: Index, files: Iterable[str]) -> dict[str, set[str]]:
    """File -> what it calls its pieces."""
    keys: dict[str, set[str]] = {file: set() for file in files}
    for key, stored in index.tensors.items():
        for piece in stored.pieces:
            if piece.file in keys:
                keys[piece.file].add(piece_key(key, piece.region))
    return keys


def _open(path: Path, file: StoredFile, keys: set[str]) -> Any:
    if _header_digest(path) != file.digest:
        raise DamagedCheckpointError(f"{path} is damaged: its header has not the digest with which it was written.")
    handle: Any = safe_open(path, framework="pt")
    if other := keys ^ set(handle.keys()):
        raise DamagedCheckpointError(f"{path} and the checkpoint's index differ in {', '.join(sorted(other))}.")
    return handle


def _read_region(
    folder: Path,
    handles: Mapping[str, Any],
    key: str,
    stored: StoredTensor,
    pieces: Iterable[Piece],
    region: Region,
) -> Tensor:
    found = torch.empty(region.sizes, dtype=stored.dtype)
    for piece in pieces:
        common = piece.region.overlap(region)
        assert common is not None
        # A copy in memory, so that what is checked is what is used: the file is only mapped.
        part: Tensor = handles[piece.file].get_tensor(piece_key(key, piece.region)).clone()
        if part.dtype != stored.dtype or tuple(part.shape) != piece.region.sizes or tensor_digest(part) != piece.digest:
            raise DamagedCheckpointError(
                f"{folder / piece.file} is damaged: {piece_key(key, piece.region)} is not what was written."
            )
        if common == region == piece.region:
            return part
        found[common.within(region)] = part[common.within(piece.region)]
    return found
