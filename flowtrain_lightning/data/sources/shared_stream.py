"""A stream that the node's reader reads: what it has read and measured comes to every process that asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flowtrain_lightning.data.node.reader_link import ReaderLink
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.sources.stream_of_samples import SampleStream, StreamPosition
from flowtrain_lightning.packing import IntArray, SampleSizes


class SharedStream(SampleStream):
    """Sizes come to all; the samples themselves, with the pictures in them, only to those who ask for them.

    Args:
        link: to the reader.
        stage: whose data the stream is.
        read: the stream, as the reader has it; nothing is read of it here.
    """

    def __init__(self, link: ReaderLink, stage: str, read: SampleStream) -> None:
        self.name = read.name
        self.fingerprint = read.fingerprint
        self._ask = partial(link.ask, stage)

    def begin(self, epoch: int, position: StreamPosition) -> None:
        """See `SampleStream`."""
        self._ask("begin", epoch, position)

    def lengths(self, start: int, end: int) -> IntArray:
        """See `SampleStream`."""
        found: IntArray = self._ask("lengths", start, end)
        return found

    def first_lengths(self, count: int) -> IntArray:
        """See `SampleStream`."""
        found: IntArray = self._ask("first_lengths", count)
        return found

    def sizes(self, samples: IntArray) -> SampleSizes:
        """See `SampleStream`."""
        found: SampleSizes = self._ask("sizes", samples)
        return found

    def records(self, samples: Sequence[int]) -> list[Record]:
        """See `SampleStream`."""
        found: list[Record] = self._ask("records", list(samples))
        return found

    def position(self, sample: int) -> StreamPosition:
        """See `SampleStream`."""
        found: StreamPosition = self._ask("position", sample)
        return found

    def forget(self, before: int) -> None:
        """See `SampleStream`."""
        self._ask("forget", before)

    @property
    def summary(self) -> str:
        """See `SampleStream`."""
        return str(self._ask("summary"))
