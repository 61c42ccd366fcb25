"""Samples that come one after another, in an order of their own, and whose number is not known: what steps ask them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.packing import IntArray, SampleSizes


class StreamPosition(NamedTuple):
    """A place in an epoch of a stream.

    Attributes:
        sample: the number of the sample there.
        read: how many rows of the stream come before it; more than samples, where some were dropped.
    """

    sample: int = 0
    read: int = 0


class SampleStream(ABC):
    """Samples by their place in a stream. Those that may still be asked for are kept, in a window that moves along.

    Attributes:
        name: its name in messages.
        fingerprint: changes with what makes other samples of the same rows.
    """

    name: str
    fingerprint: str

    def __len__(self) -> int:
        raise TypeError("A stream has no length that is known.")

    @abstractmethod
    def begin(self, epoch: int, position: StreamPosition) -> None:
        """Read an epoch from a position on."""

    @abstractmethod
    def lengths(self, start: int, end: int) -> IntArray:
        """``[end - start]`` tokens of samples ``start`` to ``end``; fewer where the stream ends."""

    @abstractmethod
    def first_lengths(self, count: int) -> IntArray:
        """``[count]`` tokens of the first samples of epoch 0, fewer where it has fewer; what was begun goes on."""

    @abstractmethod
    def sizes(self, samples: IntArray) -> SampleSizes:
        """The sizes of ``samples``, ``[n]`` indices, in that order."""

    @abstractmethod
    def records(self, samples: Sequence[int]) -> list[Record]:
        """The samples as they stand in the stream."""

    def record(self, sample: int) -> Record:
        """The sample as it stands in the stream."""
        return self.records([sample])[0]

    @abstractmethod
    def position(self, sample: int) -> StreamPosition:
        """The position of a sample of the window, or of the next one that will be read."""

    @abstractmethod
    def forget(self, before: int) -> None:
        """Let go of the samples before this one, which nobody asks for any more."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """Numbers of this epoch's rows that this run has read and used, and why others were not used."""
