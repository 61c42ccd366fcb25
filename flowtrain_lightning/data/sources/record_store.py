"""Stores of records, and the methods that every kind has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.packing import IntArray

Location = tuple[int, int]
"""The place of a record in its store: two numbers whose meaning is the store's own, such as offset and length."""


class RecordStore(Protocol):
    """Records by number, in an order that never changes while a run lasts."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def path(self) -> Path:
        """The path beside which its index is kept."""
        ...

    def locate(self) -> Iterator[Location]:
        """Find the place of each record, in order, reading no more than that takes.

        Raises:
            DataError: the store cannot be read.
        """
        ...

    def lengths(self, locations: IntArray) -> IntArray:
        """``[records]`` about how many bytes are read for each, its media included where they lie in the store.

        Args:
            locations: ``[records, 2]`` where they lie.
        """
        ...

    def records(self, first: int, locations: IntArray) -> list[Record]:
        """Records that follow each other.

        Args:
            first: the number (from 0) of the first of them.
            locations: ``[records, 2]`` where they lie.

        Raises:
            DataError: the store was changed, or a record cannot be understood.
        """
        ...

    def status(self) -> list[int]:
        """Numbers that are found at once and change when the content does."""
        ...

    def content(self) -> str:
        """The fingerprint of all content."""
        ...

    def hold(self, content: str) -> None:
        """From now on refuse to read anything else than this content."""
        ...


def locations_of(store: RecordStore) -> IntArray:
    """``[records, 2]`` where all records of a store lie.

    Raises:
        DataError: the store cannot be read.
    """
    return np.fromiter(store.locate(), dtype=np.dtype((np.int64, 2)))
