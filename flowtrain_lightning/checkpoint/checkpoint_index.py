"""The index of a checkpoint directory: where each part of a tensor lies, and the digest of everything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from flowtrain_lightning.parallel.regions import Region, cover_exactly_once


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, as it lies in a file.

    Attributes:
        region: which part.
        file: relative to the checkpoint.
        digest: of its bytes.
    """

    region: Region
    file: str
    digest: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        dtype: of all its pieces.
        shape: of the whole.
        pieces: together they are the tensor; none where it has no numbers.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        size: bytes.
        digest: of all of it; of a file of tensors, whose pieces have their own, of its header.
    """

    size: int
    digest: str


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint directory.

    Attributes:
        run: seed, allocation and halves of the run.
        lightning: Lightning's checkpoint, less what lies on the halves and what JSON cannot hold.
        values: what is no tensor among weights and optimizer states, by key.
        files: by name, relative to the directory; all but the index itself.
        tensors: by key.
    """

    run: dict[str, Any] = field(default_factory=dict)
    lightning: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)


def piece_key(name: str, region: Region) -> str:
    """Names a piece of a tensor in a file, for example ``weights.encoder.a[0,128]``: its offsets tell it apart."""
    return f"{name}[{','.join(map(str, region.offsets))}]"


def joined(parts: Iterable[Index]) -> Index:
    """The index of what several ranks wrote.

    Raises:
        RuntimeError: they differ in what a tensor is, or wrote less or more than the whole of it.
    """
    whole = Index()
    pieces: dict[str, list[Piece]] = {}
    for part in parts:
        whole.files.update(part.files)
        whole.values.update(part.values)
        for name, stored in part.tensors.items():
            known = whole.tensors.setdefault(name, StoredTensor(stored.dtype, stored.shape, ()))
            if (known.dtype, known.shape) != (stored.dtype, stored.shape):
                raise RuntimeError(
                    f"{name} is {known.dtype} {known.shape} on one rank, but {stored.dtype} {stored.shape} on another."
                )
            pieces.setdefault(name, []).extend(stored.pieces)
    for name, stored in whole.tensors.items():
        found = tuple(sorted(pieces[name], key=lambda piece: piece.region.offsets))
        if not cover_exactly_once(stored.shape, [piece.region for piece in found]):
            raise RuntimeError(
                f"The parts of {name} {stored.shape} that ranks hold are not the whole, each number once: "
                f"{[(piece.region.offsets, piece.region.sizes) for piece in found]}. A tensor of which ranks hold "
                "different parts must be a DTensor."
            )
        whole.tensors[name] = StoredTensor(stored.dtype, stored.shape, found)
    return whole
