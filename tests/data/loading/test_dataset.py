"""Every layout loads the same steps, and every rank its own shard only; data changed since are named."""

import os
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flowtrain_lightning.data import DataError, IndexConfig, IndexedSource, JsonFile, RankShard, TokenSteps
from flowtrain_lightning.data.loading.sample_loader import SampleLoader
from tests.data.support import IMAGES, MEASURE, TEMPLATE, Letters, data_module, write_image, write_set
from tests.packing.sizes import shard_of

LAYOUTS = {
    "plain 1": [RankShard.plain(0, 1)],
    "plain 2": [RankShard.plain(rank, 2) for rank in range(2)],
    "plain 4": [RankShard.plain(rank, 4) for rank in range(4)],
    "1 + 1": [shard_of(backbone=0), shard_of(encoder=0)],
    "2 + 3": [
        *(shard_of(3, 2, backbone=rank) for rank in range(2)),
        *(shard_of(3, 2, encoder=rank) for rank in range(3)),
    ],
    "colocated 2": [shard_of(2, 2, encoder=rank, backbone=rank) for rank in range(2)],
}


@pytest.fixture
def shards(tmp_path):
    """The step data sets of all ranks of a layout."""
    file = write_set(tmp_path / "d.jsonl", 12)

    def build(layout, **changes):
        found = []
        for shard in LAYOUTS[layout]:
            data = data_module(file, shard=shard, **changes)
            found.append(data.train_dataloader().steps)
        return found

    return build


def samples_read(batches):
    """The samples of all microbatches, in rising order."""
    read = [microbatch.samples for batch in batches for microbatch in batch.microbatches if microbatch]
    return sorted(sample for samples in read for sample in samples)


def media_items(batch):
    """Number in the plan, patches, grid and rows of features of every media item that a rank encodes."""
    planned = batch.plan.batches["encoder"][batch.shard.own["encoder"]]
    for numbers, packed in zip(planned, batch.media["encoder"], strict=True):
        assert (packed is None) == (len(numbers) == 0)
        for index, number in enumerate(numbers.tolist()):
            start, end = packed.cu_seqlens[index : index + 2].tolist()
            yield number, packed.patches[start:end].numpy(), packed.grid[index], packed.rows[index]


def test_records_of_a_step_are_read_once_and_in_their_order(shards, monkeypatch):
    read, record = [], IndexedSource.record

    def noted(source, sample):
        read.append(sample)
        return record(source, sample)

    monkeypatch.setattr(IndexedSource, "record", noted)
    for steps in shards("2 + 3"):
        read.clear()
        steps.load(0, 0)
        assert read
        assert read == sorted(set(read))


@pytest.mark.parametrize("layout", ["plain 4", "2 + 3", "colocated 2"])
def test_every_layout_has_the_same_samples_in_every_step(shards, layout):
    (reference,) = shards("plain 1")
    for epoch, step in ((0, 0), (0, 2), (3, 1)):
        expected = reference.load(epoch, step).plan.samples
        batches = [rank.load(epoch, step) for rank in shards(layout)]
        for batch in batches:
            np.testing.assert_array_equal(batch.plan.samples, expected)
        assert samples_read(batches) == sorted(expected.tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_media_item_is_encoded_once_from_its_own_image(shards, layout):
    (reference,) = shards("plain 1")
    batches = [rank.load(0, 1) for rank in shards(layout)]
    sizes, found = batches[0].plan.sizes, {}
    for batch in batches:
        if not batch.shard.encodes:
            assert not batch.media
            continue
        for number, patches, grid, rows in media_items(batch):
            assert number not in found
            assert rows == sizes.media_rows[number]
            assert grid.prod() == len(patches)
            found[number] = patches
    for number, owner in enumerate(sizes.media_sample.tolist()):
        record = reference.samples.source.record(int(batches[0].plan.samples[owner]))
        path = record.images[number - int(sizes.media_start[owner])]
        np.testing.assert_array_equal(found.pop(number), reference.samples.images.load(path)[0])
    assert found == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_media_token_of_a_microbatch_gets_a_row_of_features(shards, layout):
    for batch in (rank.load(0, 1) for rank in shards(layout)):
        for packed in batch.microbatches:
            if packed is None:
                continue
            positions = packed.media_positions["image"] if packed.media_positions else np.empty(0, np.int64)
            assert (packed.tokens[positions] == 6).all()
            assert int((packed.tokens == 6).sum()) == len(positions)


@pytest.fixture
def opened(monkeypatch):
    seen = []
    plain = Image.open
    monkeypatch.setattr(Image, "open", lambda file, **rest: seen.append(file.name) or plain(file, **rest))
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_are_opened_by_the_rank_that_encodes_them_and_by_no_other(shards, layout, opened):
    ranks = shards(layout)
    opened.clear()
    in_all = 0
    for rank in ranks:
        batch = rank.load(0, 0)
        encoded = 0
        if rank.shard.encodes:
            encoded = sum(map(len, batch.plan.batches["encoder"][rank.shard.own["encoder"]]))
        assert len(opened) - in_all == encoded
        in_all = len(opened)
    assert in_all == len(set(opened)) == len(batch.plan.sizes.media_rows) > 0


def test_ranks_have_equally_many_microbatches_also_in_a_small_last_step(shards):
    ranks = [
        replace(rank, sampling=replace(rank.sampling, drop_last=False))
        for rank in shards("plain 4", global_batch_size=5)
    ]
    assert [len(rank) for rank in ranks] == [3] * 4
    batches = [rank.load(0, 2) for rank in ranks]
    assert len(batches[0].plan.samples) == 2
    assert len({len(batch.microbatches) for batch in batches}) == 1
    assert any(batch.microbatches[0] is None for batch in batches)


def test_padding_fills_every_microbatch_to_the_budget(shards):
    for rank in shards("plain 2", pad_to_budget=True):
        for packed in rank.load(0, 0).microbatches:
            assert packed is None or len(packed.tokens) == 64


def test_augmentation_is_the_same_on_every_layout(shards):
    def turn(image, generator):
        return image.rotate(generator.integers(4) * 90)

    def patches(layout, epoch):
        batches = [rank.load(epoch, 0) for rank in shards(layout, augment=turn)]
        encoding = [batch for batch in batches if batch.shard.encodes]
        return {number: patches.tobytes() for batch in encoding for number, patches, _, _ in media_items(batch)}

    assert patches("plain 1", 0) == patches("2 + 3", 0) == patches("plain 4", 0)
    assert patches("plain 1", 0) != patches("plain 1", 1)


@pytest.mark.parametrize(
    ("layout", "microbatches", "group"),
    [("plain 4", 4, 1), ("1 + 1", 4, None), ("colocated 2", 3, None), ("2 + 3", 3, 1)],
)
def test_steps_of_microbatches_have_the_same_samples_on_every_layout(shards, layout, microbatches, group):
    settings = {"token_steps": TokenSteps(microbatches, group, max_delay=2), "global_batch_size": 1}
    (reference,) = shards("plain 1", **settings)
    ranks = shards(layout, **settings)
    for epoch, step in ((0, 0), (1, 0), (2, 0)):
        expected = reference.load(epoch, step).plan
        batches = [rank.load(epoch, step) for rank in ranks]
        for batch in batches:
            np.testing.assert_array_equal(batch.plan.samples, expected.samples)
            ways, rest = divmod(microbatches, len(batch.plan.microbatches))
            positions = {len(of_rank) for of_rank in batch.plan.microbatches}
            assert positions <= ({ways + 1, ways + 2} if rest else {ways})
            assert len(positions) == 1
        assert samples_read(batches) == sorted(expected.samples.tolist())
        assert all(packed is None or len(packed.tokens) <= 64 for batch in batches for packed in batch.microbatches)


@pytest.mark.parametrize("layout", ["plain 2", "2 + 3"])
def test_steps_of_which_nothing_is_said_have_the_same_samples_on_every_layout(shards, layout):
    (reference,) = shards("plain 1", global_batch_size=None)
    ranks = shards(layout, global_batch_size=None)
    for epoch, step in ((0, 0), (2, 0)):
        expected = reference.load(epoch, step).plan.samples
        assert samples_read([rank.load(epoch, step) for rank in ranks]) == sorted(expected.tolist())


@pytest.fixture
def samples(tmp_path):
    file = write_set(tmp_path / "d.jsonl", 6)
    return SampleLoader(IndexedSource(JsonFile(file), MEASURE, 99, IndexConfig()), Letters(), TEMPLATE, IMAGES, seed=1)


def image(samples, sample, number=0, epoch=0):
    rows = int(samples.source.sizes(np.array([sample])).media_rows[number])
    return samples.media(samples.source.record(sample), sample, number, rows, epoch)


def test_augmentation_draws_from_seed_epoch_sample_and_image_alone(samples):
    drawn = {}

    def augment(opened, generator):
        drawn[key] = generator.random()
        return opened

    samples = replace(samples, augment=augment)
    keys = [(1, 0, 2, 0), (1, 0, 2, 1), (1, 0, 5, 0), (1, 1, 2, 0), (2, 0, 2, 0)]
    for seed, epoch, sample, number in keys:
        key = (seed, epoch, sample, number)
        image(replace(samples, seed=seed), sample, number, epoch)
    once = dict(drawn)
    assert len(set(once.values())) == len(keys)
    for seed, epoch, sample, number in reversed(keys):
        key = (seed, epoch, sample, number)
        image(replace(samples, seed=seed), sample, number, epoch)
    assert drawn == once


def test_an_image_that_was_broken_behind_its_header_before_indexing_is_named(samples):
    path = samples.source.record(1).images[0]
    path.write_bytes(path.read_bytes()[:-40])
    samples = replace(samples, source=IndexedSource(samples.source.store, MEASURE, 64, IndexConfig()))
    with pytest.raises(DataError, match=r"record 2 \(id 'r1'\): image .*1_0\.png cannot be used: it is damaged"):
        image(samples, 1)


def test_an_image_that_changed_its_size_after_indexing_is_named(samples):
    record = replace(samples.source.record(1), status=())  # as of what lies behind an address
    write_image(record.images[0], 16, 16)
    with pytest.raises(DataError, match=r"record 2 .*gives 16 rows of features, but gave 2.*Delete the index"):
        samples.media(record, 1, 0, 2, 0)


def rewrite(path):
    path.write_text(path.read_text().replace("answer 0", "answer 9"))
    os.utime(path, (1, 1))


CHANGES = {
    "removed": (lambda path: path.unlink(), r"d\.jsonl: it is gone; it was removed after the run began to read it"),
    "emptied": (lambda path: path.write_text(""), r"d\.jsonl: it was emptied after the run began .* start again"),
    "rewritten": (rewrite, r"d\.jsonl: it was rewritten after the run began to read it .* start again"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_data_file_that_changes_while_a_run_reads_it_is_told_as_such(samples, change):
    how, words = CHANGES[change]
    how(samples.source.store.path)
    with pytest.raises(DataError, match=f"(?i){words}"):
        samples.source.record(0)


def test_a_data_file_that_was_only_touched_is_read_on(samples):
    before = samples.source.record(3)
    os.utime(samples.source.store.path, (1, 1))
    assert samples.source.record(3) == before


def test_a_record_that_changed_its_length_after_indexing_is_named(samples):
    with pytest.raises(DataError, match=r"record 1 .*has 13 tokens, but had 12 when"):
        samples.sequence(samples.source.record(0), 12, np.empty(0, np.int64))
