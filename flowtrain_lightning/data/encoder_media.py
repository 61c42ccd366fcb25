"""The media that a rank encodes or generates in a step: read, in pieces where clips are cut, and packed in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flowtrain_lightning.data.batch import GeneratedItem, PackedMedia
from flowtrain_lightning.data.collate import no_media, pack_media
from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.feature_store import FeatureStore
from flowtrain_lightning.data.formats import Record
from flowtrain_lightning.data.kept_rows import KeptRows
from flowtrain_lightning.data.loaded_media import LoadedMedia
from flowtrain_lightning.data.sample_loader import SampleLoader
from flowtrain_lightning.packing import IntArray, StepPlan
from flowtrain_lightning.packing.role_graph import GENERATED

Place = tuple[int, int]
"""A media item, by number of its sample in the step and its own number in the sample."""


class EncoderMedia:
    """Encoder batches of a step. A clip in several pieces is decoded once, from its first to its last moment here.

    Args:
        samples: loads media items.
        plan: of the step.
        batches: media item numbers of the batches.
        epoch: of the step, for augmentation.
        record_of: gives the record of a sample of the data set.
        store: where features of media items are kept, if they are.
    """

    def __init__(
        self,
        samples: SampleLoader,
        plan: StepPlan,
        batches: Sequence[IntArray],
        epoch: int,
        record_of: Callable[[int], Record],
        store: FeatureStore | None,
    ) -> None:
        self._samples, self._plan, self._batches = samples, plan, batches
        self._epoch, self._record_of, self._store = epoch, record_of, store
        self._owner = plan.sizes.media_sample
        self._wanted: dict[Place, tuple[int, int]] = {}  # moments from and to which the pieces here reach
        self._clips: dict[Place, LoadedMedia] = {}
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

    def one_moment(self, item: int) -> PackedMedia:
        """A media item by itself, of a clip its first moment: the least that ranks can encode for nothing.

        Raises:
            DataError: it cannot be used.
        """
        sizes = self._plan.sizes
        rows, moments = int(sizes.media_rows[item]), 1 if sizes.media_moments is None else sizes.media_moments[item]
        place, begin = (self._place(item), 0) if sizes.media_pieces is None else self._piece(item)[:2]
        if moments == 1 or rows % moments:
            return self._packed([item], [self._read(place, rows)])
        return pack_media([self._read(place, rows // int(moments), (begin, begin + 1))])

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
        place_of = self._place if self._plan.sizes.media_pieces is None else lambda item: self._piece(item)[0]
        rows = self._plan.sizes.media_rows
        return replace(packed, items=tuple(GeneratedItem(*place_of(item), int(rows[item])) for item in items))

    def _load(self, item: int) -> LoadedMedia:
        sizes = self._plan.sizes
        rows = int(sizes.media_rows[item])
        if sizes.media_pieces is None or sizes.media_moments is None:
            return self._read(self._place(item), rows)
        place, begin, end = self._piece(item)
        first, last = self._wanted[place]
        if (begin, end) == (first, last):
            return self._read(place, rows, (begin, end))
        if place not in self._clips:
            self._clips[place] = self._read(place, rows // (end - begin) * (last - first), (first, last))
        return self._clips[place].moments(begin - first, end - first)

    def _read(self, place: Place, rows: int, moments: tuple[int, int] | None = None) -> LoadedMedia:
        sample = int(self._plan.samples[place[0]])
        return self._samples.media(self._record_of(sample), sample, place[1], rows, self._epoch, moments)

    def _content(self, item: int) -> str:
        if self._plan.sizes.media_pieces is None:
            return self._content_of(self._place(item))
        place, begin, end = self._piece(item)
        return f"{self._content_of(place)}-{begin}-{end}"

    def _content_of(self, place: Place) -> str:
        """A name of what a whole media item contains: a file is read once for all of its pieces."""
        if place not in self._names:
            record = self._record_of(int(self._plan.samples[place[0]]))
            self._names[place] = self._samples.content(record, place[1])
        return self._names[place]

    def _place(self, item: int) -> Place:
        owner = int(self._owner[item])
        return owner, item - int(self._plan.sizes.media_start[owner])

    def _piece(self, item: int) -> tuple[Place, int, int]:
        """The media item of which one is a piece, and the moments from and to which it goes."""
        pieces = self._plan.sizes.media_pieces
        assert pieces is not None
        number, begin, end = pieces[item].tolist()
        return (int(self._owner[item]), number), begin, end
