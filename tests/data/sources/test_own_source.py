"""Samples of a source of one's own, beside files or alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.data import DataError, GivenTokens, LoadedMedia, MediaError, SampleSizes, SampleSource
from flowtrain_lightning.data.records.formats import Record
from tests.data.support import data_module
from tests.exactness.hearing import MEDIA_IDS, Given, Memory, memory_data
from tests.tiny import IMAGES, tiny_data, write_records


def steps_of(data):
    data.setup("fit")
    return list(data.train_dataloader())


def test_media_of_ones_own_are_packed_by_modality_with_the_places_of_their_rows():
    assert isinstance(Memory(), SampleSource)
    for batch in steps_of(memory_data()):
        each = len(batch.media["encoder"]) // len(batch.microbatches)
        for number, packed in enumerate(batch.microbatches):
            media = [item for item in batch.media["encoder"][number * each : (number + 1) * each] if item is not None]
            assert [item.modality for item in media] == list(packed.media_positions)
            for item in media:
                places = packed.media_positions[item.modality]
                assert len(places) == sum(item.rows)
                assert (packed.tokens[places] == MEDIA_IDS[item.modality]).all()
                assert int(item.cu_seqlens[-1]) == len(item.patches)


def test_samples_of_ones_own_stand_beside_those_of_files(tmp_path):
    file = write_records(tmp_path, 12)
    data = tiny_data(tmp_path, train=[file, Memory()], shuffle=False, images=IMAGES)
    modalities = {item.modality for batch in steps_of(data) for item in batch.media["encoder"] if item is not None}
    assert modalities == {"image", "audio"}


class Changed(Memory):
    """Its first sample with media has another item in its place."""

    def __init__(self, change):
        super().__init__()
        sample = self.samples[0]
        self.samples[0] = replace(sample, media=(change(sample.media[0]), *sample.media[1:]))


class Mislabelled(Given):
    def load(self) -> LoadedMedia:
        return super().load()._replace(modality="audio")


class Unreadable(Given):
    def load(self) -> LoadedMedia:
        raise MediaError("it is noise")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda item: Mislabelled(item.modality, item.values, item.grid),
            "media item is loaded as 'audio', but .* say 'image'",
        ),
        (lambda item: replace(item, values=np.concatenate([item.values] * 2)), "rows of features, but gave"),
        (lambda item: Unreadable(item.modality, item.values, item.grid), "sample 0: media item .* it is noise"),
    ],
    ids=["another modality", "another size", "unreadable"],
)
def test_media_that_are_not_what_the_sizes_say_are_refused(change, words):
    with pytest.raises(DataError, match=words):
        steps_of(memory_data(Changed(change)))


class Numbering:
    """Two samples, each with a picture of one value; its pictures are numbered from 0."""

    def __init__(self, name, value):
        self.fingerprint, self.value = name, value

    def __len__(self):
        return 2

    def sizes(self, samples):
        one, ends = np.ones(2, np.int64), np.arange(3)
        return SampleSizes(3 * one, 2 * one, ends, one, 4 * one, media_content=np.arange(2)).select(samples)

    def record(self, sample):
        ids = np.array([6, 65, 66])
        written = GivenTokens(ids, ids != 6)
        return Record(
            f"{self.fingerprint} {sample}", str(sample), (), (OfValue(self.value + sample),), {}, written=written
        )


class OfValue:
    def __init__(self, value):
        self.value = value

    def load(self):
        return LoadedMedia(np.full((4, 12), self.value, np.float32), (2, 2), 1)


def test_two_sources_that_number_their_pictures_alike_share_none():
    sources = [Numbering("cats", 10.0), Numbering("dogs", 20.0), Numbering("cats", 10.0)]
    (batch,) = steps_of(data_module(sources, token_steps=None, global_batch_size=6, shuffle=False))
    seen = [
        float(item.patches[row, 0]) for item in batch.media["encoder"] if item for row in range(0, len(item.patches), 4)
    ]
    assert sorted(seen) == [10.0, 11.0, 20.0, 21.0]
