"""The index as a file, ``index.json``: written last, and believed only where all that it speaks of is there and whole.

It is JSON of two parts. The first line holds the format, and the digest of it and of what follows the line::

    {"flowtrain": 2, "digest": "5f1c...",
    "run": {...}, "lightning": {...}, "values": {...}, "files": {...}, "tensors": {...}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from flowtrain_lightning.checkpoint.checkpoint_index import Index, Piece, StoredFile, StoredTensor
from flowtrain_lightning.checkpoint.digest import digest_of
from flowtrain_lightning.checkpoint.files import write_bytes
from flowtrain_lightning.parallel.ranks.messages import decode_message, encode_message
from flowtrain_lightning.parallel.regions import Region, cover_exactly_once

FORMAT = 2
INDEX = "index.json"
TENSOR_FILES = "*.safetensors"
OBJECT_FILES = "*.pt"

_MOST = (1 << 62) - 1  # of offsets and of sizes, so that 64 bits hold their sum

_FIRST_LINE = re.compile(rb'\{"flowtrain": ([1-9][0-9]*), "digest": "([0-9a-f]{32})",\n')


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was written: something of it is missing, changed or too much."""


def write_index(folder: Path, index: Index) -> None:
    """Writes the index, last of all files; it is on the disk when this returns."""
    content = json.dumps(encode_part(index))[1:].encode()
    first = f'{{"flowtrain": {FORMAT}, "digest": "{_digest(FORMAT, content)}",\n'.encode()
    write_bytes(first + content, folder / INDEX)


def read_index(folder: Path) -> Index:
    """Reads the index, and sees whether all files are there, of their sizes, and every tensor is whole.

    Raises:
        DamagedCheckpointError: names the file, or the tensor.
        ValueError: the directory is no checkpoint, or of another format.
    """
    index = parse_index(folder)
    _check_files(folder, index)
    _check_tensors(folder / INDEX, index)
    return index


def parse_index(folder: Path) -> Index:
    """Reads the index alone, without a look at what it speaks of.

    Raises:
        DamagedCheckpointError: it is missing, or damaged.
        FileNotFoundError: there is no such directory.
        ValueError: the directory is no checkpoint, or of another format, or it is a file.
    """
    path = folder / INDEX
    if not path.is_file():
        if not folder.exists():
            raise FileNotFoundError(f"There is no {folder}; give the path of a checkpoint directory of flowtrain.")
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is a file, but flowtrain's checkpoints are directories. A plain Lightning checkpoint needs "
                "no export; of a file within a checkpoint, give the directory."
            )
        if any(folder.glob(f"*/rank-{TENSOR_FILES}")):
            raise DamagedCheckpointError(f"{path} is missing.")
        raise ValueError(f"{folder} is a directory without flowtrain's {INDEX}: no checkpoint. Give another path.")
    data = path.read_bytes()
    first = _FIRST_LINE.match(data)
    if first is None:
        raise DamagedCheckpointError(f"{path} does not begin as the index of a checkpoint does.")
    number, content = int(first[1]), data[first.end() :]
    if _digest(number, content) != first[2].decode():
        raise DamagedCheckpointError(f"{path} is damaged: it has not the digest with which it was written.")
    if number != FORMAT:
        raise ValueError(
            f"{folder} has format {number}, but this version of flowtrain reads format {FORMAT}. Use the version that "
            "wrote it."
        )
    try:
        return decode_part(json.loads(b"{" + content, object_pairs_hook=_each_key_once))
    except Exception as error:  # whatever it is instead of what `encode_part` makes
        raise DamagedCheckpointError(f"{path} is damaged: {type(error).__name__} {error}.") from error


def _digest(number: int, content: bytes) -> str:
    return digest_of(b"%d\n" % number + content)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which readers may differ on what a key means that stands there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key stands twice among {', '.join(key for key, _ in pairs)}")
    return found


def stored_file(path: Path) -> StoredFile:
    """The index's entry of a file that is no file of tensors."""
    data = path.read_bytes()
    return StoredFile(len(data), digest_of(data))


def read_checked(folder: Path, name: str, index: Index) -> bytes:
    """The content of such a file.

    Raises:
        DamagedCheckpointError: it is missing, or not what was written.
    """
    if name not in index.files:
        raise DamagedCheckpointError(f"{folder / INDEX} does not list {name}.")
    data = (folder / name).read_bytes()
    if digest_of(data) != index.files[name].digest:
        raise DamagedCheckpointError(f"{folder / name} is damaged: it has not the digest with which it was written.")
    return data


def _check_files(folder: Path, index: Index) -> None:
    for name, file in index.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing.")
        if path.stat().st_size != file.size:
            raise DamagedCheckpointError(
                f"{path} has {path.stat().st_size:,} bytes, but was written with {file.size:,}."
            )
    for path in sorted((*folder.rglob(TENSOR_FILES), *folder.rglob(OBJECT_FILES))):
        if str(path.relative_to(folder)) not in index.files:
            raise DamagedCheckpointError(f"{path} is no file of the checkpoint in which it lies.")


def _check_tensors(path: Path, index: Index) -> None:
    for name, stored in index.tensors.items():
        if not cover_exactly_once(stored.shape, [piece.region for piece in stored.pieces]):
            raise DamagedCheckpointError(
                f"{path} is damaged: the pieces of {name} {stored.shape} are not the whole of it, each number once."
            )
    listed = {name for name in index.files if fnmatch(name, TENSOR_FILES)}
    if other := listed ^ {piece.file for stored in index.tensors.values() for piece in stored.pieces}:
        raise DamagedCheckpointError(f"{path} is damaged: it is at variance with itself on {', '.join(sorted(other))}.")
    for name, stored in index.tensors.items():
        for piece in stored.pieces:
            if piece.region.elements * stored.dtype.itemsize > index.files[piece.file].size:
                raise DamagedCheckpointError(
                    f"{path} is damaged: {name} {stored.shape} takes more bytes than {piece.file} has."
                )


# ---- as JSON --------------------------------------------------------------------------------------------------------


def encode_part(index: Index) -> dict[str, Any]:
    """An index, or a rank's part of one, in JSON types."""
    return {
        "run": _plain(index.run),
        "lightning": _plain(index.lightning),
        "values": _plain(index.values),
        "files": {name: {"size": file.size, "digest": file.digest} for name, file in index.files.items()},
        "tensors": {name: _encode_tensor(stored) for name, stored in index.tensors.items()},
    }


def decode_part(content: Mapping[str, Any]) -> Index:
    """Returns what :func:`encode_part` was given.

    Raises:
        KeyError, TypeError, ValueError: it has another form.
    """
    return Index(
        run=_dictionary(content["run"]),
        lightning=_dictionary(content["lightning"]),
        values=_dictionary(content["values"]),
        files={name: StoredFile(int(file["size"]), str(file["digest"])) for name, file in content["files"].items()},
        tensors={name: _decode_tensor(name, stored) for name, stored in content["tensors"].items()},
    )


def _encode_tensor(stored: StoredTensor) -> dict[str, Any]:
    return {
        "dtype": str(stored.dtype).removeprefix("torch."),
        "shape": list(stored.shape),
        "pieces": [
            {
                "offsets": list(piece.region.offsets),
                "sizes": list(piece.region.sizes),
                "file": piece.file,
                "digest": piece.digest,
            }
            for piece in stored.pieces
        ],
    }


def _decode_tensor(name: str, stored: Mapping[str, Any]) -> StoredTensor:
    try:
        dtype = getattr(torch, stored["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{stored['dtype']} is no type of numbers")
        pieces = (
            Piece(Region(_counts(piece["offsets"]), _counts(piece["sizes"])), str(piece["file"]), str(piece["digest"]))
            for piece in stored["pieces"]
        )
        return StoredTensor(dtype, _counts(stored["shape"]), tuple(pieces))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def _counts(numbers: list[Any]) -> tuple[int, ...]:
    if not all(type(number) is int and abs(number) <= _MOST for number in numbers):
        raise TypeError(f"{numbers} are no whole numbers, or too large ones")
    return tuple(numbers)


def _plain(value: Any) -> Any:
    return json.loads(encode_message(value))


def _dictionary(value: Any) -> dict[str, Any]:
    found = decode_message(json.dumps(value).encode())
    if not isinstance(found, dict):
        raise TypeError(f"{value!r:.80} is no dictionary")
    return found


@contextmanager
def offering_another(path: Path) -> Iterator[None]:
    """Inside, what is said of a damaged checkpoint ends with the name of the one that can take its place.

    Raises:
        DamagedCheckpointError: as inside, with that name or the advice to copy the checkpoint there again.
    """
    try:
        yield
    except DamagedCheckpointError as error:
        other = _checkpoint_before(path)
        advice = (
            f"The checkpoint before it that has all its files is {other}: pass that as ckpt_path."
            if other
            else "No other checkpoint in that folder has all its files: copy it there again from where it is whole."
        )
        raise DamagedCheckpointError(f"{error} {advice}") from error


def _checkpoint_before(path: Path) -> Path | None:
    """The checkpoint beside ``path`` of the most steps, but not of more than it has itself if that can be told."""
    own = _steps(parse_index, path)
    others = (other for other in path.parent.iterdir() if other.is_dir() and not other.name.startswith("."))
    steps = {other: _steps(read_index, other) for other in others if not other.samefile(path)}
    before = {other: taken for other, taken in steps.items() if taken is not None and (own is None or taken <= own)}
    return max(before, key=lambda other: (before[other], other.name), default=None)


def _steps(read: Callable[[Path], Index], path: Path) -> int | None:
    """Returns the number of steps of a checkpoint's run; None where that cannot be read."""
    try:
        return int(read(path).lightning.get("global_step", 0))
    except (OSError, ValueError):
        return None
