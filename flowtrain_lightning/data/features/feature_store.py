"""Features of frozen encoders in a folder: each written once, read by ranks, later epochs and later runs.

They are files, not a database of LMDB: its writers wait for each other, its room is set ahead, and it is not made for
disks that nodes share. `benchmarks/kept_features.py` compares their times.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flowtrain_lightning.packing.setting_values import check_settings

_SUFFIX = ".safetensors"
_LAST_USE = "last_use"
_LEDGER = ".bytes"
_LOCK_SECONDS = 10.0
_RECOUNTED_AFTER = 3600.0
"""Seconds after which files are counted anew: of those whose writer was killed the ledger knows nothing."""
_MADE_ROOM = 0.05
"""Part of the bound that is freed at a time, so that not every file that is written looks for others to remove."""


class FeaturesNotKept(ValueError):
    """Features of an encoder cannot be kept; the message says why and what to do."""


@dataclass(frozen=True)
class KeepFeatures:
    """A folder for the features of frozen encoders: the section ``keep_features`` of a data module.

    Attributes:
        folder: on a disk that is faster than the encoder. Ranks, nodes and runs may share it.
        most_bytes: of all that is kept there. Where it is full, what the run used that began to use it longest ago goes
            first; what this run uses stays.
    """

    folder: str | Path
    most_bytes: int = 100_000_000_000

    def __post_init__(self) -> None:
        check_settings(self, least={"most_bytes": 1})

    def store(self, name: str) -> FeatureStore:
        """The part of it for one encoder.

        Args:
            name: of all that features follow from beside the pixels.
        """
        return FeatureStore(Path(self.folder).absolute(), name, self.most_bytes)


@dataclass(frozen=True)
class FeatureStore:
    """Features of media items as one encoder makes them, a file for each item. All ranks and runs write the same.

    Attributes:
        folder: of all encoders.
        name: of this one: the folder below in which its features lie.
        most_bytes: of all files below ``folder``.
    """

    folder: Path
    name: str
    most_bytes: int

    def open(self) -> int:
        """Makes the folder, says that it is used now, and counts what is there; returns its bytes.

        Raises:
            OSError: it cannot be written.
        """
        own = self.folder / self.name
        own.mkdir(parents=True, exist_ok=True)
        (own / _LAST_USE).touch()
        with self._locked() as ledger:
            used, counted = _read(ledger)
            if time.time() - counted > _RECOUNTED_AFTER:
                used = _count(self.folder)
                _write(ledger, used, time.time())
        return used

    def read(self, item: str, rows: int) -> tuple[Tensor, ...] | None:
        """The features of a media item; None where there are none. A damaged file is removed.

        Args:
            item: name of what the encoder sees.
            rows: how many rows they must have.
        """
        path = self._path(item)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with suppress(SafetensorError, ValueError, KeyError, TypeError, RuntimeError):
            features = unpacked(content)
            if all(feature.shape[0] == rows for feature in features):
                return features
        with suppress(OSError):
            path.unlink()
        return None

    def write(self, item: str, features: Sequence[Tensor]) -> bool:
        """Keeps the features of a media item; says whether there was room.

        Args:
            item: name of what the encoder sees.
            features: ``[rows, ...]`` each, on the CPU.

        Raises:
            OSError: they cannot be written; nothing of them is left.
        """
        path = self._path(item)
        if path.exists():  # by another rank or run
            return True
        content = packed(features)
        if not self._reserve(len(content)):
            return False
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{item}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            with suppress(OSError):
                self._reserve(-len(content))
            raise
        return True

    def _path(self, item: str) -> Path:
        return self.folder / self.name / item[:2] / f"{item}{_SUFFIX}"

    def _reserve(self, nbytes: int) -> bool:
        """Counts so many bytes more; where there is no room, older runs' files make some."""
        with self._locked() as ledger:
            used, counted = _read(ledger)
            if nbytes > 0 and used + nbytes > self.most_bytes:
                used -= self._remove_older(used + nbytes - self.most_bytes)
            fits = used + nbytes <= self.most_bytes
            _write(ledger, max(used + nbytes, 0) if fits else used, counted)
        return fits

    def _remove_older(self, nbytes: int) -> int:
        """Removes files of encoders whose last run began before this one; returns how many bytes these were."""
        wanted, removed = max(nbytes, int(_MADE_ROOM * self.most_bytes)), 0
        for _, folder in sorted(self._older()):
            for file in _files(folder):
                if removed >= wanted:
                    return removed
                with suppress(OSError):
                    size = os.stat(file).st_size
                    os.unlink(file)
                    removed += size
        return removed

    def _older(self) -> Iterator[tuple[float, Path]]:
        """When their last run began, and where they lie."""
        own = (self.folder / self.name / _LAST_USE).stat().st_mtime
        for folder in self.folder.iterdir():
            with suppress(OSError):
                if folder.name != self.name and (used := (folder / _LAST_USE).stat().st_mtime) < own:
                    yield used, folder

    @contextmanager
    def _locked(self) -> Iterator[IO[str]]:
        """The ledger of all bytes below the folder, for this process alone."""
        with (self.folder / _LEDGER).open("a+") as ledger:
            end = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise TimeoutError(f"{ledger.name} was locked by another process all the time") from None
                    time.sleep(0.005)
            yield ledger


def _read(ledger: IO[str]) -> tuple[int, float]:
    """The bytes of all files, and when these were counted; long ago where a ledger is new or damaged."""
    ledger.seek(0)
    try:
        used, counted = json.loads(ledger.read())
        return int(used), float(counted)
    except (ValueError, TypeError):
        return 0, 0.0


def _write(ledger: IO[str], used: int, counted: float) -> None:
    ledger.seek(0)
    ledger.truncate()
    ledger.write(json.dumps([used, counted]))
    ledger.flush()


def _files(folder: Path) -> Iterator[str]:
    """Those of features, and those that are being written, or of which a writer died."""
    for each in os.scandir(folder):
        if each.is_dir(follow_symlinks=False):
            yield from (file.path for file in os.scandir(each.path))


def _count(root: Path) -> int:
    """The bytes of all files of features; what a writer that died has left is removed."""
    used, now = 0, time.time()
    for folder in root.iterdir():
        for file in _files(folder) if folder.is_dir() else ():
            with suppress(OSError):
                found = os.stat(file)
                if not file.endswith(_SUFFIX) and now - found.st_mtime > _RECOUNTED_AFTER:
                    os.unlink(file)
                else:
                    used += found.st_size
    return used


def packed(features: Sequence[Tensor]) -> bytes:
    """A file of safetensors that holds the digest of its tensors."""
    named = {str(number): feature.contiguous() for number, feature in enumerate(features)}
    content: bytes = save(named, metadata={"digest": _digest(list(named.values()))})
    return content


def unpacked(content: bytes) -> tuple[Tensor, ...]:
    """The features that a file holds.

    Raises:
        ValueError: it is not what was written.
    """
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    named = load(content)
    features = [named[str(number)] for number in range(len(named))]
    if header["__metadata__"]["digest"] != _digest(features):
        raise ValueError("its digest is another one")
    return tuple(features)


def _digest(features: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for feature in features:
        digest.update(f"{feature.dtype} {tuple(feature.shape)};".encode())
        digest.update(feature.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
