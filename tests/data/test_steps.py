"""Every layout loads the same steps, and every rank its own part only."""

import numpy as np
import pytest
from PIL import Image

from flowtrain_lightning.data import RankShard
from tests.data.support import data_module, write_set

LAYOUTS = {
    "plain 1": [RankShard.plain(0, 1)],
    "plain 2": [RankShard.plain(rank, 2) for rank in range(2)],
    "plain 4": [RankShard.plain(rank, 4) for rank in range(4)],
    "1 + 1": [RankShard(0, 1, None, 1), RankShard(None, 1, 0, 1)],
    "2 + 3": [
        *(RankShard(rank, 2, None, 3) for rank in range(2)),
        *(RankShard(None, 2, rank, 3) for rank in range(3)),
    ],
    "colocated 2": [RankShard(rank, 2, rank, 2) for rank in range(2)],
}


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """The step data sets of all ranks of a layout."""
    file = write_set(tmp_path / "d.jsonl", 12)

    def build(layout, **changes):
        found = []
        for part in LAYOUTS[layout]:
            data = data_module(file, **changes)
            data.setup("fit")
            monkeypatch.setattr(data, "_part", lambda part=part: part)
            found.append(data.train_dataloader().steps)
        return found

    return build


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_samples_in_every_step(parts, layout):
    (reference,) = parts("plain 1")
    for epoch, step in ((0, 0), (0, 2), (3, 1)):
        expected = reference.load(epoch, step).plan.samples
        batches = [rank.load(epoch, step) for rank in parts(layout)]
        for batch in batches:
            np.testing.assert_array_equal(batch.plan.samples, expected)
        read = [
            sample
            for batch in batches
            for microbatch in batch.microbatches
            for sample in (microbatch.samples if microbatch else ())
        ]
        assert sorted(read) == sorted(expected.tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_microbatch_finds_the_features_of_its_own_media(parts, layout):
    (reference,) = parts("plain 1")
    alone = {sample: reference.samples.source.record(sample).pictures for sample in range(12)}
    batches = [rank.load(0, 1) for rank in parts(layout)]
    plan = batches[0].plan
    media_of = {}
    for batch in batches:
        if batch.part.encoder_rank is None:
            assert batch.encoder_batches == ()
            continue
        for numbers, packed in zip(plan.encoder_batches[batch.part.encoder_rank], batch.encoder_batches, strict=True):
            assert (packed is None) == (len(numbers) == 0)
            for place, number in enumerate(numbers.tolist()):
                start, end = packed.cu_seqlens[place : place + 2].tolist()
                media_of[number] = packed.patches[start:end].numpy()
                assert packed.rows[place] == plan.sizes.media_rows[number]
                assert packed.grid[place].prod() == end - start
    for number, owner in enumerate(plan.sizes.media_sample.tolist()):
        path = alone[int(plan.samples[owner])][number - int(plan.sizes.media_start[owner])]
        np.testing.assert_array_equal(media_of[number], reference.samples.images.load(path)[0])
    for batch in batches:
        for packed in batch.microbatches:
            if packed is None:
                continue
            places = packed.media_positions["image"] if packed.media_positions else np.empty(0, np.int64)
            assert (packed.tokens[places] == 6).all()
            assert int((packed.tokens == 6).sum()) == len(places)


@pytest.fixture
def opened(monkeypatch):
    seen = []
    plain = Image.open
    monkeypatch.setattr(Image, "open", lambda path, *rest: seen.append(path) or plain(path, *rest))
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pictures_are_opened_by_the_rank_that_encodes_them_and_by_no_other(parts, layout, opened):
    ranks = parts(layout)
    opened.clear()
    in_all = 0
    for rank in ranks:
        batch = rank.load(0, 0)
        encoded = 0
        if rank.part.encoder_rank is not None:
            encoded = sum(map(len, batch.plan.encoder_batches[rank.part.encoder_rank]))
        assert len(opened) - in_all == encoded
        in_all = len(opened)
    assert in_all == len(set(opened)) == len(batch.plan.sizes.media_rows) > 0


def test_ranks_have_equally_many_microbatches_also_in_a_small_last_step(parts):
    ranks = parts("plain 4", global_batch_size=5, drop_last=False)
    assert [len(rank) for rank in ranks] == [3] * 4
    batches = [rank.load(0, 2) for rank in ranks]
    assert len(batches[0].plan.samples) == 2
    assert len({len(batch.microbatches) for batch in batches}) == 1
    assert any(batch.microbatches[0] is None for batch in batches)


def test_padding_fills_every_microbatch_to_the_budget(parts):
    for rank in parts("plain 2", pad_to_budget=True):
        for packed in rank.load(0, 0).microbatches:
            assert packed is None or len(packed.tokens) == 64


def test_augmentation_is_the_same_on_every_layout(parts):
    def turn(picture, generator):
        return picture.rotate(generator.integers(4) * 90)

    def patches(layout, epoch):
        found = {}
        for rank in parts(layout, augment=turn):
            batch = rank.load(epoch, 0)
            if rank.part.encoder_rank is None:
                continue
            for numbers, packed in zip(
                batch.plan.encoder_batches[rank.part.encoder_rank], batch.encoder_batches, strict=True
            ):
                for place, number in enumerate(numbers.tolist()):
                    start, end = packed.cu_seqlens[place : place + 2].tolist()
                    found[number] = packed.patches[start:end].sum().item(), packed.patches[start].tolist()
        return found

    assert patches("plain 1", 0) == patches("2 + 3", 0) == patches("plain 4", 0)
    assert patches("plain 1", 0) != patches("plain 1", 1)


TOKENS = {"batch_unit": "tokens", "microbatches": 4, "global_batch_size": 1, "max_delay": 2}


@pytest.mark.parametrize("layout", ["plain 1", "plain 2", "plain 4", "1 + 1", "2 + 3", "colocated 2"])
@pytest.mark.parametrize("width", [1, 4])
def test_steps_of_microbatches_have_the_same_samples_on_every_layout(parts, layout, width):
    (reference,) = parts("plain 1", balance_group=width, **TOKENS)
    ranks = parts(layout, balance_group=width, **TOKENS)
    for epoch, step in ((0, 0), (1, 0), (2, 0)):
        expected = reference.load(epoch, step).plan
        batches = [rank.load(epoch, step) for rank in ranks]
        for batch in batches:
            np.testing.assert_array_equal(batch.plan.samples, expected.samples)
            assert [len(of_rank) for of_rank in batch.plan.microbatches] == [4 // len(batch.plan.microbatches)] * len(
                batch.plan.microbatches
            )
        read = [
            sample
            for batch in batches
            for microbatch in batch.microbatches
            for sample in (microbatch.samples if microbatch else ())
        ]
        assert sorted(read) == sorted(expected.samples.tolist())
        assert all(packed is None or len(packed.tokens) <= 64 for batch in batches for packed in batch.microbatches)
