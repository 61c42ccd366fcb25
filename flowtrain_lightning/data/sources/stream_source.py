"""The rows of a stream that can only be read in order, made samples by the process that reads them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.media.media_status import status_of
from flowtrain_lightning.data.records.formats import Record, parse
from flowtrain_lightning.data.sources.index import IndexConfig
from flowtrain_lightning.data.sources.measuring import Measure, concatenated, measure_records
from flowtrain_lightning.data.sources.slow_reading import named_if_slow
from flowtrain_lightning.data.sources.stream_of_samples import SampleStream, StreamPosition
from flowtrain_lightning.data.sources.table_rows import row_as_record
from flowtrain_lightning.packing import IntArray, SampleSizes

_READ_AT_ONCE = 64
"""Rows that are read before they are measured together, at most."""

BYTES_AT_ONCE = 1 << 26
"""Of media that lie in the rows; the row that makes them more is the last that is read."""

_END = object()


class _Held(NamedTuple):
    """A sample in the window."""

    read: int
    record: Record
    sizes: SampleSizes


class _Rows:
    """A stream that is read in several passes at once, perhaps of several epochs, which it is told by ``set_epoch``.

    Args:
        stream: gives rows, and can be iterated again and again.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._epoch: int | None = None

    def from_row(self, epoch: int, number: int) -> Iterator[Any]:
        """The rows of an epoch from this one on."""
        while True:
            self._epoch = epoch
            if hasattr(self._stream, "set_epoch"):
                self._stream.set_epoch(epoch)
            for row in islice(iter(self._stream), number, None):
                number += 1
                yield row
                if self._epoch != epoch:  # told by another pass: this one goes on with an iterator of its own
                    break
            else:
                return


class StreamSource(SampleStream):
    """Samples of a stream that this process reads, anew for every epoch; each is measured, but its images not decoded.

    Args:
        stream: gives rows like those of a table: a ``datasets.IterableDataset`` or anything that can be iterated again
            and again, the same on every rank.
        measure: what decides the sizes.
        token_budget: the most tokens that a sample may have.
        config: what happens to a longer one, and to one whose images cannot be used.

    Raises:
        DataError: the stream can be read only once.
    """

    def __init__(self, stream: Any, measure: Measure, token_budget: int, config: IndexConfig) -> None:
        if iter(stream) is stream:
            raise DataError(
                f"{type(stream).__name__} can be read only once; give an object whose __iter__ begins anew, such as a "
                "datasets.IterableDataset."
            )
        # As tables a row keeps its images in bytes; decoded, all ranks would decode all images.
        self._stream = _Rows(stream.with_format("arrow") if hasattr(stream, "with_format") else stream)
        self._measure = measure
        self._token_budget = token_budget
        self._too_long = config.too_long
        self.name = f"stream {type(stream).__name__}"
        self.fingerprint = fingerprint(["stream", measure.prompt, config.too_long, config.unreadable])
        self._rows: Iterator[Any] = iter(())
        self._window: deque[_Held] = deque()
        self._first = 0
        self._read = 0
        self._ended = False
        self._failed: Exception | None = None
        self._left_out: Counter[str] = Counter()

    def begin(self, epoch: int, position: StreamPosition) -> None:
        """See `SampleStream`."""
        self._window, self._left_out = deque(), Counter()
        self._first, self._read, self._ended, self._failed = position.sample, position.read, False, None
        self._rows = self._stream.from_row(epoch, position.read)

    def begun(self, epoch: int, position: StreamPosition) -> StreamSource:
        """The same stream, read from a position of an epoch on, beside what is read of it already."""
        beside = copy(self)
        beside.begin(epoch, position)
        return beside

    def first_lengths(self, count: int) -> IntArray:
        """See `SampleStream`."""
        return self.begun(0, StreamPosition()).lengths(0, count)

    def lengths(self, start: int, end: int) -> IntArray:
        """See `SampleStream`."""
        self._read_until(end)
        found = islice(self._window, start - self._first, max(end - self._first, 0))
        return np.concatenate([np.empty(0, np.int64), *(held.sizes.tokens for held in found)])

    def sizes(self, samples: IntArray) -> SampleSizes:
        """See `SampleStream`."""
        return concatenated([self._held(sample).sizes for sample in samples.tolist()])

    def records(self, samples: Sequence[int]) -> list[Record]:
        """See `SampleStream`."""
        return [self._held(sample).record for sample in samples]

    def position(self, sample: int) -> StreamPosition:
        """See `SampleStream`."""
        number = sample - self._first
        return StreamPosition(sample, self._window[number].read if number < len(self._window) else self._read)

    @property
    def first(self) -> int:
        """The oldest sample that is kept."""
        return self._first

    @property
    def kept_bytes(self) -> int:
        """Of images and videos inside the samples that are kept."""
        return sum(held.record.bytes_inside for held in self._window)

    @property
    def summary(self) -> str:
        """See `SampleStream`."""
        used = self._first + len(self._window)
        left_out = [f"{count} {reason}" for reason, count in self._left_out.items()]
        return ", ".join([f"{self.name}: {self._read} rows read, {used} of them used", *left_out])

    def forget(self, before: int) -> None:
        """See `SampleStream`."""
        while self._window and self._first < before:
            self._window.popleft()
            self._first += 1

    def _held(self, sample: int) -> _Held:
        self._read_until(sample + 1)
        if sample < self._first:
            raise LookupError(f"Sample {sample} is over; the window of the stream begins at {self._first}.")
        return self._window[sample - self._first]

    def _read_until(self, end: int) -> None:
        with ThreadPoolExecutor(1) as threads:
            while not self._ended and self._first + len(self._window) < end:
                if self._failed is not None:  # whoever asks next would take the rows behind for those
                    raise self._failed
                try:
                    self._read_more(threads)
                except Exception as error:
                    self._failed = error
                    raise

    def _read_more(self, threads: ThreadPoolExecutor) -> None:
        records = self._next_records()
        found = measure_records(records, self._measure, threads)
        for number, record in enumerate(records):
            sizes = found.sizes.select(np.asarray([number]))
            fitting = self._fitting(record, sizes) if found.usable[number] else None
            if not found.usable[number]:
                self._leave_out(record, "dropped for a media item that cannot be used")
            media = slice(*found.sizes.media_start[number : number + 2].tolist())
            record = replace(record, status=status_of(found.status.found[media]))
            if fitting is not None:
                self._window.append(_Held(self._read + number, record, fitting))
        self._read += len(records)

    def _next_records(self) -> list[Record]:
        """Those that are measured together; fewer where the stream ends."""
        records: list[Record] = []
        size = 0
        while len(records) < _READ_AT_ONCE and (row := self._next_row(self._read + len(records))) is not _END:
            records.append(self._parsed(row, self._read + len(records)))
            size += records[-1].bytes_inside
            if size >= BYTES_AT_ONCE:
                return records
        self._ended = len(records) < _READ_AT_ONCE
        return records

    def _next_row(self, number: int) -> Any:
        """The next row, or ``_END``.

        Raises:
            DataError: the stream cannot give it.
        """
        try:
            with named_if_slow(lambda: f"{self.name} has not given its row {number + 1}"):
                return next(self._rows, _END)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{self.name}: its row {number + 1} cannot be read: {error!r}") from error

    def _parsed(self, row: Any, number: int) -> Record:
        fields = row_as_record(row.to_pylist()[0]) if hasattr(row, "to_pylist") else row
        how = self._measure.ignored, self._measure.columns
        return self._measure.reaching(parse(fields, self.name, number, Path, *how))

    def _leave_out(self, record: Record, reason: str) -> None:
        self._left_out[reason] += 1
        if self._left_out[reason] == 1:
            rank_zero_warn(f"{record.where}: {reason}. How many are is told at the end of the stream's epoch.")

    def _fitting(self, record: Record, sizes: SampleSizes) -> SampleSizes | None:
        """The sizes of a sample that fits into the budget or was cut to it; None leaves it out."""
        tokens = int(sizes.tokens[0])
        if tokens <= self._token_budget:
            return sizes
        if self._too_long == "drop":
            self._leave_out(record, f"dropped as longer than token_budget={self._token_budget}")
            return None
        if self._too_long == "error":
            raise DataError(
                f"{record.where}: it has {tokens} tokens, more than token_budget={self._token_budget}; raise it, "
                "shorten the record, or set too_long='drop' or 'truncate' in IndexConfig."
            )
        sequence = self._measure.sequence(record, sizes.media_rows).cut(self._token_budget)
        if sequence.targets == 0 and not self._measure.prompt:
            self._leave_out(record, f"dropped since no target was left within token_budget={self._token_budget}")
            return None
        media = len(sequence.media_rows)
        return SampleSizes(
            tokens=np.asarray([len(sequence)]),
            targets=np.asarray([sequence.targets]),
            media_start=np.asarray([0, media]),
            media_rows=sizes.media_rows[:media],
            media_patches=sizes.media_patches[:media],
            media_modality=None if sizes.media_modality is None else sizes.media_modality[:media],
            media_content=None if sizes.media_content is None else sizes.media_content[:media],
            media_parts=None if sizes.media_parts is None else sizes.media_parts[:media],
        )
