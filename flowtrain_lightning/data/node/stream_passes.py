"""One stream, read once for several processes that ask for the same samples, each at its own pace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from flowtrain_lightning.data.sources.stream_of_samples import StreamPosition
from flowtrain_lightning.data.sources.stream_source import StreamSource
from flowtrain_lightning.packing import IntArray

KEPT_BYTES = 1 << 30
"""Of images and videos in samples that are kept for processes that have not begun yet, at most. Who comes later reads
the stream anew for itself."""


class StreamPasses:
    """Reads a stream for processes that begin it at the same places.

    Whoever begins where others began joins them, as long as nothing was let go of, and all read by one iterator. A
    sample is kept until each of them has let go of it; before all that are expected have come, all samples are.

    Args:
        source: the stream.
        readers: how many processes are expected.
    """

    def __init__(self, source: StreamSource, readers: int) -> None:
        self._source = source
        self._readers = readers
        self._passes: dict[int, _Pass] = {}
        self._first: dict[int, IntArray] = {}
        self._lock = threading.Lock()

    def answer(self, reader: int, method: str, args: tuple[Any, ...]) -> Any:
        """A request: a method of `SampleStream`."""
        with self._lock:
            if method == "begin":
                return self._begin(reader, *args)
            if method == "first_lengths":
                (count,) = args
                if count not in self._first:
                    self._first[count] = self._source.first_lengths(count)
                return self._first[count]
            begun = self._passes[reader]
            if method == "forget":
                return begun.forget(reader, *args)
            return _ASKED[method](begun.source, *args)

    def leave(self, reader: int) -> None:
        """The process has ended, or begins anew."""
        with self._lock:
            self._leave(reader)

    def _begin(self, reader: int, epoch: int, position: StreamPosition) -> None:
        self._leave(reader)
        for begun in self._passes.values():
            if begun.can_be_joined(reader, epoch, position):
                break
        else:
            begun = _Pass(self._source.begun(epoch, position), epoch, position, self._readers)
        begun.join(reader)
        self._passes[reader] = begun

    def _leave(self, reader: int) -> None:
        begun = self._passes.pop(reader, None)
        if begun is not None:
            begun.leave(reader)


class _Pass:
    """One iterator's samples, and how far each process has come with them.

    Args:
        source: the stream, begun for this pass alone.
        epoch: the epoch.
        position: where it was begun.
        readers: how many processes are expected.
    """

    def __init__(self, source: StreamSource, epoch: int, position: StreamPosition, readers: int) -> None:
        self.source = source
        self._began = epoch, position
        self._awaited = readers
        self._joined: set[int] = set()
        self._oldest: dict[int, int] = {}

    def can_be_joined(self, reader: int, epoch: int, position: StreamPosition) -> bool:
        """Whether a process that begins there finds all that it will ask for."""
        return self._began == (epoch, position) and self.source.first == position.sample and reader not in self._joined

    def join(self, reader: int) -> None:
        self._joined.add(reader)
        self._oldest[reader] = self.source.first

    def forget(self, reader: int, before: int) -> None:
        self._oldest[reader] = before
        self._let_go()

    def leave(self, reader: int) -> None:
        del self._oldest[reader]
        self._let_go()

    def _let_go(self) -> None:
        all_came = len(self._joined) >= self._awaited
        if self._oldest and (all_came or self.source.kept_bytes > KEPT_BYTES):
            self.source.forget(min(self._oldest.values()))


_ASKED: Mapping[str, Callable[..., Any]] = {
    "lengths": StreamSource.lengths,
    "sizes": StreamSource.sizes,
    "records": StreamSource.records,
    "position": StreamSource.position,
    "summary": attrgetter("summary"),
}
"""What a process that has begun may ask of its pass."""
