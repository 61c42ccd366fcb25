"""Where samples and their sizes come from: the protocol, one file, and several sources as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.formats import DataError, Record, read
from flowtrain_lightning.data.index import IndexConfig, IndexTable, Measure, TooLong, index_table
from flowtrain_lightning.packing import IntArray, SampleSizes

Files = str | Path | Sequence[str | Path]
"""One data file, or several that are read as one."""

WeightedFiles = Files | Mapping[str, float]
"""Data files, perhaps with the weight that each has in a mixture."""


def paths_of(stage: str, files: WeightedFiles) -> list[Path]:
    """The paths of a stage's files.

    Raises:
        DataError: there is none, or files have weights in a stage that does not train.
    """
    if isinstance(files, str | Path):
        return [Path(files)]
    if not files:
        raise DataError(f"{stage} is an empty list of files; name at least one, or leave the argument out.")
    if isinstance(files, Mapping) and stage != "train":
        raise DataError(f"{stage} gives files weights, which only train may have; give a list of files.")
    return [Path(file) for file in files]


class SampleSource(Protocol):
    """Samples by number, with sizes that are known before anything is loaded. Equal on all ranks."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever a sample's number would mean another sample."""
        ...

    def __len__(self) -> int:
        """Samples in all."""
        ...

    def sizes(self, samples: IntArray) -> SampleSizes:
        """The sizes of these samples, in that order."""
        ...

    def record(self, sample: int) -> Record:
        """The sample as it stands in the data."""
        ...


class FileSource:
    """The samples of one file: those of its records that can be used, in the file's order.

    Args:
        path: the data file.
        measure: what decides the sizes.
        token_budget: the most tokens that a sample may have.
        config: what happens to a longer one (one that is cut is left out if no target is left), and where the index
            is kept.

    Attributes:
        path: the data file.
        fingerprint: changes whenever a sample's number would mean another sample.
        summary: a sentence that says how many records are used, and why the others are not.

    Raises:
        DataError: the file, a record or an image cannot be used, or no sample is left.
    """

    def __init__(self, path: Path, measure: Measure, token_budget: int, config: IndexConfig) -> None:
        self.path = path
        too_long = config.too_long
        table = index_table(path, measure, config.cache_dir)
        if len(table.offsets) == 0:
            raise DataError(f"{path}: there is no record in it.")
        self._offsets, self._lengths = table.offsets, table.lengths
        long = np.flatnonzero(table.readable & (table.sizes.tokens > token_budget))
        sizes, emptied = table.sizes, np.empty(0, np.int64)
        if len(long) and too_long == "error":
            self._refuse(int(long[0]), table, token_budget)
        if too_long == "truncate":
            sizes, emptied = self._cut(long, table, measure, token_budget)
        kept = table.readable.copy()
        kept[long if too_long == "drop" else emptied] = False
        self._records = np.flatnonzero(kept)
        self._sizes = sizes.select(self._records)
        self.fingerprint = fingerprint([table.content, measure.prompt, np.flatnonzero(~kept).tolist()])
        self.summary = self._summary(table, too_long, token_budget, long, emptied, measure.prompt)
        if len(self) == 0:
            raise DataError(f"{path}: no record is left to use. {self.summary}")

    def __len__(self) -> int:
        return len(self._records)

    def sizes(self, samples: IntArray) -> SampleSizes:
        """The sizes of these samples, in that order."""
        return self._sizes.select(samples)

    def record(self, sample: int) -> Record:
        """The record that this sample is."""
        return self._read(int(self._records[sample]))

    def _read(self, number: int) -> Record:
        return read(self.path, number, int(self._offsets[number]), int(self._lengths[number]))

    def _refuse(self, number: int, table: IndexTable, token_budget: int) -> None:
        start, end = table.sizes.media_start[number : number + 2].tolist()
        raise DataError(
            f"{self._read(number).where}: it has {table.sizes.tokens[number]} tokens "
            f"({table.sizes.media_rows[start:end].sum()} of them from {end - start} images), more than "
            f"token_budget={token_budget}; raise the budget, shorten the record, or set too_long='drop' or 'truncate' "
            "in IndexConfig."
        )

    def _cut(
        self, long: IntArray, table: IndexTable, measure: Measure, token_budget: int
    ) -> tuple[SampleSizes, IntArray]:
        """Sizes with the long records cut, and the records of which nothing to learn is left."""
        sizes = table.sizes
        tokens, targets, media = sizes.tokens.copy(), sizes.targets.copy(), np.diff(sizes.media_start)
        for number in long.tolist():
            rows = sizes.media_rows[sizes.media_start[number] : sizes.media_start[number + 1]]
            record = self._read(number)
            sequence = measure.template.sequence(record, measure.tokenizer, rows, prompt=measure.prompt)
            sequence = sequence.cut(token_budget)
            tokens[number], targets[number], media[number] = len(sequence), sequence.targets, len(sequence.media_rows)
        kept = np.arange(len(sizes.media_rows)) - sizes.media_start[sizes.media_sample] < media[sizes.media_sample]
        start = np.concatenate([[0], np.cumsum(media)]).astype(np.int64)
        cut = SampleSizes(tokens, targets, start, sizes.media_rows[kept], sizes.media_patches[kept])
        # A prompt has no target to begin with.
        return cut, long[:0] if measure.prompt else long[targets[long] == 0]

    def _summary(
        self, table: IndexTable, too_long: TooLong, token_budget: int, long: IntArray, emptied: IntArray, prompt: bool
    ) -> str:
        unreadable = int(np.count_nonzero(~table.readable))
        told = [f"{self.path.name}: {len(self)} of {len(table.offsets)} records used"]
        if unreadable:
            told.append(f"{unreadable} dropped for an image that cannot be used")
        if len(long) and too_long == "drop":
            told.append(f"{len(long)} dropped as longer than token_budget={token_budget}")
        if len(long) and too_long == "truncate":
            told.append(f"{len(long) - len(emptied)} cut to token_budget={token_budget}")
        if len(emptied):
            told.append(f"{len(emptied)} dropped since no target was left within token_budget={token_budget}")
        without_loss = 0 if prompt else int(np.count_nonzero(self._sizes.targets == 0))
        if without_loss:
            told.append(f"{without_loss} of these without loss, as nothing in them is said by the assistant")
        return ", ".join(told) + "."


class JoinedSources:
    """Several sources as one: the samples of the first, then those of the second, and so on."""

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self.sources = tuple(sources)
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
        """The sizes of these samples, in that order."""
        owner = np.searchsorted(self._start, samples, side="right") - 1
        parts = [
            source.sizes(samples[owner == number] - self._start[number]) for number, source in enumerate(self.sources)
        ]
        # The parts stand source by source; the asked order is restored by one selection.
        by_source = np.argsort(owner, kind="stable")
        asked = np.empty(len(samples), dtype=np.int64)
        asked[by_source] = np.arange(len(samples), dtype=np.int64)
        return _concatenated(parts).select(asked)

    def record(self, sample: int) -> Record:
        """The sample as it stands in its source."""
        owner = int(np.searchsorted(self._start, sample, side="right")) - 1
        return self.sources[owner].record(sample - int(self._start[owner]))


def _concatenated(parts: Sequence[SampleSizes]) -> SampleSizes:
    counts = np.concatenate([np.diff(part.media_start) for part in parts])
    return SampleSizes(
        tokens=np.concatenate([part.tokens for part in parts]),
        targets=np.concatenate([part.targets for part in parts]),
        media_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        media_rows=np.concatenate([part.media_rows for part in parts]),
        media_patches=np.concatenate([part.media_patches for part in parts]),
    )
