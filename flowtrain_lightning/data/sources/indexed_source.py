"""The samples of a store of records whose sizes an index keeps: which are used, cut, dropped or refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.media.media_status import status_of
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.sources.index import IndexConfig, IndexTable, TooLong, index_table
from flowtrain_lightning.data.sources.measurers import Measurer, this_process
from flowtrain_lightning.data.sources.measuring import Measure
from flowtrain_lightning.data.sources.record_store import RecordStore
from flowtrain_lightning.packing import IntArray, SampleSizes


class IndexedSource:
    """The samples of one store: those of its records that can be used, in the store's order.

    Args:
        store: the records.
        measure: what decides the sizes.
        token_budget: the most tokens that a sample may have.
        config: what happens to a longer one (one that is cut is left out if no target is left), and where the index
            is kept.
        measurer: measures the store, where no index of it is kept.
        media_compared: another process of this machine has just looked whether files of media have changed.

    Attributes:
        store: the records.
        fingerprint: changes whenever a sample's number would mean another sample.
        summary: a sentence that says how many records are used, and why the others are not.
        content_by_digest: numbers of media content follow from the content, and mean the same in other sources.

    Raises:
        DataError: the store, a record or an image cannot be used, or no sample is left.
    """

    content_by_digest = True

    def __init__(
        self,
        store: RecordStore,
        measure: Measure,
        token_budget: int,
        config: IndexConfig,
        measurer: Measurer = this_process,
        *,
        media_compared: bool = False,
    ) -> None:
        self.store = store
        self._measure = measure
        too_long = config.too_long
        table = index_table(store, measure, config.cache_dir, measurer, media_compared=media_compared)
        store.hold(table.content)
        if len(table) == 0:
            raise DataError(f"{store.path}: there is no record in it.")
        self._locations = table.locations
        self._media_start, self._media_found = table.sizes.media_start, table.media_found
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
            raise DataError(f"{store.path}: no record is left to use. {self.summary}")
        if not measure.prompt and not self._sizes.targets.any():
            raise DataError(
                f"{store.path}: nothing would be learned from it, since in no record the assistant says anything. "
                "Call the role that answers 'assistant'."
            )

    def __len__(self) -> int:
        return len(self._records)

    def sizes(self, samples: IntArray) -> SampleSizes:
        """The sizes of these samples, in that order."""
        return self._sizes.select(samples)

    def record(self, sample: int) -> Record:
        """The record that this sample is."""
        number = int(self._records[sample])
        start, end = self._media_start[number : number + 2].tolist()
        return replace(self._read(number), status=status_of(self._media_found[start:end]))

    def where(self, sample: int) -> str:
        """The place of the record that this sample is, for messages; nothing is read to find it."""
        return f"{self.store.path}, record {int(self._records[sample]) + 1}"

    def _read(self, number: int) -> Record:
        return self._measure.reaching(self.store.records(number, self._locations[number : number + 1])[0])

    def _refuse(self, number: int, table: IndexTable, token_budget: int) -> None:
        start, end = table.sizes.media_start[number : number + 2].tolist()
        raise DataError(
            f"{self._read(number).where}: it has {table.sizes.tokens[number]} tokens "
            f"({table.sizes.media_rows[start:end].sum()} of them from {end - start} media items), more than "
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
            sequence = measure.sequence(record, rows)
            sequence = sequence.cut(token_budget)
            tokens[number], targets[number], media[number] = len(sequence), sequence.targets, len(sequence.media_rows)
        kept = np.arange(len(sizes.media_rows)) - sizes.media_start[sizes.media_sample] < media[sizes.media_sample]
        start = np.concatenate([[0], np.cumsum(media)]).astype(np.int64)
        told = {name: getattr(sizes, name) for name in ("media_content", "media_parts", "media_modality")}
        of_kept = {name: None if numbers is None else numbers[kept] for name, numbers in told.items()}
        cut = SampleSizes(tokens, targets, start, sizes.media_rows[kept], sizes.media_patches[kept], **of_kept)
        # A prompt has no target to begin with.
        return cut, long[:0] if measure.prompt else long[targets[long] == 0]

    def _summary(
        self, table: IndexTable, too_long: TooLong, token_budget: int, long: IntArray, emptied: IntArray, prompt: bool
    ) -> str:
        unreadable = int(np.count_nonzero(~table.readable))
        told = [f"{self.store.name}: {len(self)} of {len(table)} records used"]
        if unreadable:
            told.append(f"{unreadable} dropped for a media item that cannot be used")
        if len(long) and too_long == "drop":
            told.append(f"{len(long)} dropped as longer than token_budget={token_budget}")
        if len(long) and too_long == "truncate":
            told.append(f"{len(long) - len(emptied)} cut to token_budget={token_budget}")
        if len(emptied):
            told.append(f"{len(emptied)} dropped since no target was left within token_budget={token_budget}")
        if table.animated:
            told.append(f"{table.animated} images are animated, of which the first picture is used")
        without_loss = 0 if prompt else int(np.count_nonzero(self._sizes.targets == 0))
        if without_loss:
            told.append(f"{without_loss} of these without loss, as nothing in them is said by the assistant")
        return ", ".join(told) + "."
