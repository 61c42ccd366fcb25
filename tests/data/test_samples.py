"""A sample's chance depends on its own name alone, and data that changed since they were measured are named."""

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.data import DataError, MetadataIndex
from flowtrain_lightning.data.index import Measure
from flowtrain_lightning.data.samples import SampleLoader
from tests.data.support import IMAGES, TEMPLATE, Letters, write_picture, write_set


@pytest.fixture
def loader(tmp_path):
    measure = Measure(Letters(), TEMPLATE, IMAGES, "error", prompt=False)
    source = MetadataIndex(write_set(tmp_path / "d.jsonl", 6), measure, token_budget=99, too_long="error")
    return SampleLoader(source, Letters(), TEMPLATE, IMAGES, seed=1)


def picture(loader, sample, number=0, epoch=0):
    rows = int(loader.source.sizes(np.array([sample])).media_rows[number])
    return loader.picture(loader.source.record(sample), sample, number, rows, epoch)


def test_chance_depends_on_seed_epoch_sample_and_picture_alone(loader):
    drawn = {}

    def augment(image, generator):
        drawn[key] = generator.random()
        return image

    loader = replace(loader, augment=augment)
    keys = [(1, 0, 2, 0), (1, 0, 2, 1), (1, 0, 5, 0), (1, 1, 2, 0), (2, 0, 2, 0)]
    for seed, epoch, sample, number in keys:
        key = (seed, epoch, sample, number)
        picture(replace(loader, seed=seed), sample, number, epoch)
    once = dict(drawn)
    assert len(set(once.values())) == len(keys)
    for seed, epoch, sample, number in reversed(keys):
        key = (seed, epoch, sample, number)
        picture(replace(loader, seed=seed), sample, number, epoch)
    assert drawn == once


def test_a_picture_that_broke_after_indexing_is_named(loader):
    path = loader.source.record(1).pictures[0]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"record 2 \(id 'r1'\): picture .*1_0\.png cannot be used: .* decoded"):
        picture(loader, 1)


def test_a_picture_that_changed_its_size_after_indexing_is_named(loader):
    write_picture(loader.source.record(1).pictures[0], 16, 16)
    with pytest.raises(DataError, match=r"record 2 .*gives 16 rows of features, but gave 2.*Delete the index"):
        picture(loader, 1)


def test_a_file_that_changed_after_indexing_is_named(loader):
    path = loader.source.path
    path.write_text(path.read_text().replace("answer 0", "answer_00")[1:])
    with pytest.raises(DataError, match=r"d\.jsonl, record 1: not valid JSON"):
        loader.sequence(0, 14, np.empty(0, np.int64))


def test_a_record_that_changed_its_length_after_indexing_is_named(loader):
    with pytest.raises(DataError, match=r"record 1 .*has 13 tokens, but had 12 when"):
        loader.sequence(0, 12, np.empty(0, np.int64))
