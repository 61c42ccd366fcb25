"""Reads history and hyperparameters of an offline Weights & Biases run from its file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_FILE_HEADER, _BLOCK, _CHUNK_HEADER = 7, 32 * 1024, 7
_CLOSED_WITHIN = 60  # seconds


def read_history(folder: Path) -> list[dict[str, Any]]:
    """What was logged, one dictionary per call, of the only run under ``folder``."""
    return [_values(record.history.item) for record in _read(folder) if record.HasField("history")]


def read_config(folder: Path) -> dict[str, Any]:
    """The hyperparameters of the only run under ``folder``."""
    config: dict[str, Any] = {}
    for record in _read(folder):
        for changed in (record.config, record.run.config):
            config |= _values(changed.update)
    return config


def _read(folder: Path) -> list[Record]:
    """All records of a run that has ended. ``finish`` returns before its service has closed the file: this waits."""
    (file,) = folder.glob("**/offline-run-*/*.wandb")
    deadline = time.monotonic() + _CLOSED_WITHIN
    while True:
        records = list(_parsed(file))
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < deadline, f"{file} has no end after {_CLOSED_WITHIN} seconds"
        time.sleep(0.1)


def _parsed(file: Path) -> Iterator[Record]:
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        yield record


def _values(items: Iterable[Any]) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a log in leveldb's format: blocks of chunks, each with a header of checksum, length and kind.

    The first block holds the file's own header as well. A chunk is whole (1) or a first, middle or last part (2-4).
    """
    position, parts = _FILE_HEADER, b""
    while position + _CHUNK_HEADER <= len(content):
        if _BLOCK - position % _BLOCK < _CHUNK_HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        parts += content[position + _CHUNK_HEADER : position + _CHUNK_HEADER + length]
        position += _CHUNK_HEADER + length
        if kind in (1, 4):
            yield parts
            parts = b""
