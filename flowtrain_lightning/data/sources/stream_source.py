"""Samples of a stream that can only be read in order and whose length is not known."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.formats import Record, parse
from flowtrain_lightning.data.index import IndexConfig
from flowtrain_lightning.data.measuring import Measure, concatenated, measure_records
from flowtrain_lightning.data.media_status import status_of
from flowtrain_lightning.packing import IntArray, SampleSizes

_READ_AT_ONCE = 64
"""Rows that are read before they are measured together, at most."""

BYTES_AT_ONCE = 1 << 26
"""Of media that lie in the rows; the row that makes them more is the last that is read."""


SLOW_SECONDS = 60.0
"""After which a row that has not come is named."""

_SLOW = "%s has not given its row %d within %.3g s. Its source is slow, or hangs."
_END = object()

_log = logging.getLogger("lightning.pytorch")  # whose messages of ranks other than 0 are shown, too


class StreamPosition(NamedTuple):
    """A place in an epoch of a stream.

    Attributes:
        sample: the number of the sample there.
        read: how many rows of the stream come before it; more than samples, where some were dropped.
    """

    sample: int = 0
    read: int = 0


class _Held(NamedTuple):
    """A sample in the window."""

    read: int
    record: Record
    sizes: SampleSizes


class StreamSource:
    """Samples by their place in a stream. Those that may still be asked for are kept, in a window that moves along.

    The stream is read anew for every epoch, which it is told by ``set_epoch`` where it has that. Every rank reads it
    whole and measures each sample, so that all know the same sizes; only images are decoded by one rank alone.

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
        self._stream = stream.with_format("arrow") if hasattr(stream, "with_format") else stream
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
        self._left_out: Counter[str] = Counter()

    def begin(self, epoch: int, position: StreamPosition) -> None:
        """Read an epoch from a position on."""
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)
        self._window.clear()
        self._left_out.clear()
        self._first, self._read, self._ended = position.sample, position.read, False
        self._rows = islice(iter(self._stream), position.read, None)

    def __len__(self) -> int:
        raise TypeError("A stream has no length that is known.")

    def lengths(self, start: int, end: int) -> IntArray:
        """``[end - start]`` tokens of samples ``start`` to ``end``; fewer where the stream ends."""
        self._read_until(end)
        found = islice(self._window, start - self._first, max(end - self._first, 0))
        return np.concatenate([np.empty(0, np.int64), *(held.sizes.tokens for held in found)])

    def sizes(self, samples: IntArray) -> SampleSizes:
        """The sizes of ``samples``, ``[n]`` indices, in that order."""
        return concatenated([self._held(sample).sizes for sample in samples.tolist()])

    def record(self, sample: int) -> Record:
        """The sample as it stands in the stream."""
        return self._held(sample).record

    def position(self, sample: int) -> StreamPosition:
        """The position of a sample of the window, or of the next one that will be read."""
        number = sample - self._first
        return StreamPosition(sample, self._window[number].read if number < len(self._window) else self._read)

    @property
    def samples(self) -> int:
        """Samples of this epoch that were read so far, with those before the position from which it was begun."""
        return self._first + len(self._window)

    @property
    def summary(self) -> str:
        """Numbers of this epoch's rows that this run has read and used, and why others were not used."""
        left_out = [f"{count} {reason}" for reason, count in self._left_out.items()]
        return ", ".join([f"{self.name}: {self._read} rows read, {self.samples} of them used", *left_out])

    def forget(self, before: int) -> None:
        """Let go of the samples before this one, which nobody asks for any more."""
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
        slow = threading.Timer(SLOW_SECONDS, _log.warning, [_SLOW, self.name, number + 1, SLOW_SECONDS])
        slow.daemon = True
        slow.start()
        try:
            return next(self._rows, _END)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{self.name}: its row {number + 1} cannot be read: {error!r}") from error
        finally:
            slow.cancel()

    def _parsed(self, row: Any, number: int) -> Record:
        fields = row.to_pylist()[0] if hasattr(row, "to_pylist") else row
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
