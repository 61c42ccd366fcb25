"""The media that a rank encodes or generates in a step: read, in pieces where they are cut, and packed in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flowtrain_lightning.data.batch import GeneratedItem, PackedMedia
from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.features.feature_store import FeatureStore
from flowtrain_lightning.data.features.kept_rows import KeptRows
from flowtrain_lightning.data.loading.collate import no_media, pack_media
from flowtrain_lightning.data.loading.sample_loader import SampleLoader
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from flowtrain_lightning.data.media.media_files import VideoFile
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.packing import IntArray, StepPlan
from flowtrain_lightning.packing.role_graph import GENERATED

Place = tuple[int, int]
"""A media item, by number of its sample in the step and its own number in the sample."""


class EncoderMedia:
    """Encoder batches of a step. A media item in several pieces is decoded once, from its first to its last part here.

    Args:
        samples: loads media items.
        plan: of the step.
        batches: media item numbers of the batches.
        epoch: of the step, for augmentation.
        record_of: gives the record of a sample of the data set.
        store: where features of media items are kept, if they are.
        apart: the encoder takes tiles of a picture apart.
    """

    def __init__(
        self,
        samples: SampleLoader,
        plan: StepPlan,
        batches: Sequence[IntArray],
        epoch: int,
        record_of: Callable[[int], Record],
        store: FeatureStore | None,
        *,
        apart: bool,
    ) -> None:
        self._samples, self._plan, self._batches = samples, plan, batches
        self._epoch, self._record_of, self._store, self._apart = epoch, record_of, store, apart
        self._owner = plan.sizes.media_sample
        self._wanted: dict[Place, tuple[int, int]] = {}  # parts from and to which the pieces here reach
        self._decoded: dict[Place, LoadedMedia] = {}
        self._names: dict[Place, str] = {}
        if plan.sizes.media_pieces is not None:
            for item in (item for batch in batches for item in batch.tolist()):
                place, begin, end = self._piece(item)
                first, last = self._wanted.get(place, (begin, end))
                self._wanted[place] = min(first, begin), max(last, end)

    def packed(self) -> list[PackedMedia | None]:
        """All batches in order; None where one is empty.

        Raises:
            DataError: a media item cannot be used.
        """
        return [self._batch(items) if len(items) else None for items in self._batches]

    def one_part(self, item: int) -> PackedMedia:
        """The first part of a media item by itself: the least that ranks can encode for nothing.

        Raises:
            DataError: it cannot be used.
        """
        place, begin, end = self._piece(item)
        rows, parts = int(self._plan.sizes.media_rows[item]), end - begin
        may_be_cut = self._apart or isinstance(self._record(place).media[place[1]], VideoFile)
        if may_be_cut and rows % parts == 0:
            rows, end = rows // parts, begin + 1
        return self._packed([item], [self._read(place, rows, (begin, end))])

    def _batch(self, items: IntArray) -> PackedMedia:
        modality, kept, wanted = self._plan.sizes.modality_of(items[0]), None, items.tolist()
        if self._store is not None and modality != GENERATED:
            rows = self._plan.sizes.media_rows[items].tolist()
            kept = KeptRows.found(self._store, list(map(self._content, wanted)), rows)
            wanted = [wanted[place] for place in kept.missing]
        loaded = [self._load(item) for item in wanted]
        other = next((found.modality for found in loaded if found.modality != modality), None)
        if other is not None:
            raise DataError(
                f"A media item is loaded as {other!r}, but the sizes of its source say {modality!r} "
                "(SampleSizes.media_modality). Say the same in both."
            )
        packed = self._packed(wanted, loaded) if loaded else no_media(modality)
        return packed if kept is None else replace(packed, kept=kept)

    def _packed(self, items: Sequence[int], loaded: Sequence[LoadedMedia]) -> PackedMedia:
        packed = pack_media(loaded)
        if packed.modality != GENERATED:
            return packed
        rows = self._plan.sizes.media_rows
        return replace(packed, items=tuple(GeneratedItem(*self._piece(item)[0], int(rows[item])) for item in items))

    def _load(self, item: int) -> LoadedMedia:
        rows, (place, begin, end) = int(self._plan.sizes.media_rows[item]), self._piece(item)
        if self._plan.sizes.media_pieces is None:
            return self._read(place, rows, (begin, end))
        first, last = self._wanted[place]
        if (begin, end) == (first, last):
            return self._read(place, rows, (begin, end))
        if place not in self._decoded:
            self._decoded[place] = self._read(place, rows // (end - begin) * (last - first), (first, last))
        return self._decoded[place].between(begin - first, end - first)

    def _read(self, place: Place, rows: int, parts: tuple[int, int]) -> LoadedMedia:
        sample = int(self._plan.samples[place[0]])
        return self._samples.media(self._record(place), sample, place[1], rows, self._epoch, parts)

    def _record(self, place: Place) -> Record:
        return self._record_of(int(self._plan.samples[place[0]]))

    def _content(self, item: int) -> str:
        place, begin, end = self._piece(item)
        pieces = self._plan.sizes.media_pieces
        # A piece that begins with a first part is of the next media item.
        if pieces is None or (begin == 0 and (item + 1 == len(pieces) or pieces[item + 1, 1] == 0)):
            return self._content_of(place)  # whole, whatever else the step cuts
        return f"{self._content_of(place)}-{begin}-{end}"

    def _content_of(self, place: Place) -> str:
        """A name of what a whole media item contains: a file is read once for all of its pieces."""
        if place not in self._names:
            self._names[place] = self._samples.content(self._record(place), place[1])
        return self._names[place]

    def _piece(self, item: int) -> tuple[Place, int, int]:
        """The media item of which one is a piece, or which it is, and the parts from and to which it goes."""
        sizes, owner = self._plan.sizes, int(self._owner[item])
        if sizes.media_pieces is not None:
            number, begin, end = sizes.media_pieces[item].tolist()
            return (owner, number), begin, end
        parts = 1 if sizes.media_parts is None else int(sizes.media_parts[item])
        return (owner, item - int(sizes.media_start[owner])), 0, parts
