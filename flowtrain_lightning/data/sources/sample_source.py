"""Samples by number, with known sizes: the protocol, and several sources as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.sources.measuring import concatenated
from flowtrain_lightning.packing import IntArray, SampleSizes


@runtime_checkable
class SampleSource(Protocol):
    """Samples by number, with sizes that are known before anything is loaded. Equal on all ranks.

    A data module takes one of your own in the place of a file.
    """

    @property
    def fingerprint(self) -> str:
        """Changes whenever a sample's number would mean another sample."""
        ...

    def __len__(self) -> int:
        """Samples in all."""
        ...

    def sizes(self, samples: IntArray) -> SampleSizes:
        """The sizes of ``samples``, ``[n]`` indices, in that order."""
        ...

    def record(self, sample: int) -> Record:
        """The sample as it stands in the data."""
        ...


def _told_apart(sizes: SampleSizes, source: SampleSource) -> SampleSizes:
    """Sizes whose numbers of media content mean the same beside those of other sources.

    Sources of files number content by its digest. One of the user's own may count from 0, as another one does.
    """
    if sizes.media_content is None or getattr(source, "content_by_digest", False):
        return sizes
    salt = int(fingerprint(source.fingerprint)[:15], 16)
    return replace(
        sizes, media_content=np.where(sizes.media_content < 0, sizes.media_content, sizes.media_content ^ salt)
    )


class JoinedSources:
    """Several sources as one: the samples of the first, then those of the second, and so on.

    Args:
        sources: the sources.
        weights: of each in a mixture; None takes their lengths.

    Attributes:
        sources: the sources.
        weights: of each in a mixture; None takes their lengths.
    """

    def __init__(self, sources: Sequence[SampleSource], weights: tuple[float, ...] | None = None) -> None:
        self.sources = tuple(sources)
        self.weights = weights
        self._start = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Samples of each source."""
        return tuple(len(source) for source in self.sources)

    @property
    def fingerprint(self) -> str:
        """Changes with any source's fingerprint and with their order."""
        return fingerprint([source.fingerprint for source in self.sources])

    def __len__(self) -> int:
        return int(self._start[-1])

    def sizes(self, samples: IntArray) -> SampleSizes:
        """The sizes of ``samples``, ``[n]`` indices, in that order."""
        owner = np.searchsorted(self._start, samples, side="right") - 1
        parts = [
            _told_apart(source.sizes(samples[owner == number] - self._start[number]), source)
            for number, source in enumerate(self.sources)
        ]
        # The parts stand source by source; the asked order is restored by one selection.
        by_source = np.argsort(owner, kind="stable")
        asked = np.empty(len(samples), dtype=np.int64)
        asked[by_source] = np.arange(len(samples), dtype=np.int64)
        return concatenated(parts).select(asked)

    def record(self, sample: int) -> Record:
        """The sample as it stands in its source."""
        source, number = self._owner(sample)
        return source.record(number)

    def where(self, sample: int) -> str:
        """The place of a sample, for messages; nothing is read to find it."""
        source, number = self._owner(sample)
        place = getattr(source, "where", None)
        return f"{type(source).__name__}, sample {number}" if place is None else str(place(number))

    def _owner(self, sample: int) -> tuple[SampleSource, int]:
        owner = int(np.searchsorted(self._start, sample, side="right")) - 1
        return self.sources[owner], sample - int(self._start[owner])
