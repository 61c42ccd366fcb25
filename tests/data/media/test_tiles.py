"""Tiles of a picture as media items of their own: read once a rank, and whole where an encoder joins them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers")

from flowtrain_lightning.data import StepDataset
from flowtrain_lightning.data.media.large_media import LargeMedia
from flowtrain_lightning.models import HuggingFaceImages
from tests.exactness.data import steps_data, write_steps
from tests.models.tiny import FAMILIES
from tests.packing.sizes import make_sizes, meeting_of, shard_of

TILE = 16
"""Patches of a tile."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> StepDataset:
    """Steps of pictures of up to five tiles."""
    folder = tmp_path_factory.mktemp("tiles")
    write_steps(folder)
    data = steps_data(folder, images=FAMILIES["internvl"].images, token_budget=160)
    data.setup("fit")
    return data.train_dataloader().steps


def dealt(steps: StepDataset, rank: int, ranks: int = 2) -> StepDataset:
    """The same steps in tiles, on one of several ranks that encode."""
    packing = replace(steps.packing, encoder_budget=4 * TILE)
    shard = shard_of(ranks, 1, encoder=rank, meets={"encoder": meeting_of(ranks)})
    return replace(steps, cuts_media=True, packing=packing, shard=shard)


def test_tiles_are_together_the_picture_and_each_rank_reads_it_once(steps, monkeypatch):
    whole, read, found = replace(steps, shard=shard_of(1, 1, encoder=0)).load(0, 0), [], {}
    values = HuggingFaceImages.values

    def counted(self, image, grid, size):
        read.append((rank, image.tobytes()))
        return values(self, image, grid, size)

    monkeypatch.setattr(HuggingFaceImages, "values", counted)
    for rank in range(2):
        batch = dealt(steps, rank).load(0, 0)
        for items, media in zip(batch.plan.batches["encoder"][rank], batch.media["encoder"], strict=True):
            assert (media.grid.prod(dim=1) == TILE).all()
            assert len(media.pixels) <= 4 * TILE
            found |= dict(zip(items.tolist(), media.pixels.split(TILE), strict=True))
    padding = 2  # pictures of which a rank reads a tile once more, to encode it where only others have a batch
    assert len(read) <= len(set(read)) + padding
    pieces = batch.plan.sizes.media_pieces
    assert int(whole.plan.sizes.media_parts.max()) * TILE > 4 * TILE, "a picture has more than the encoder's budget"
    assert sorted(found) == list(range(len(pieces)))
    pictures = {}
    for items, media in zip(whole.plan.batches["encoder"][0], whole.media["encoder"], strict=True):
        lengths = media.grid.prod(dim=1).tolist()
        pictures |= dict(zip(items.tolist(), media.pixels.split(lengths), strict=True))
    np.testing.assert_array_equal(
        np.concatenate([found[item] for item in sorted(found)]),
        np.concatenate([pictures[item] for item in sorted(pictures)]),
    )


def test_padding_is_one_tile_where_these_are_taken_apart_and_else_a_whole_picture(steps):
    cut = dealt(steps, 0)
    (one,) = cut.load(0, 0).padding_media["encoder"].tiles
    assert one.number == 1
    assert one.before + one.behind > 0
    padding = replace(cut, cuts_media=False).load(0, 0).padding_media["encoder"]
    assert not any(tiles.before + tiles.behind for tiles in padding.tiles)


def test_what_stays_whole_is_told_once(caplog):
    sizes, told = replace(make_sizes((5, [12])), media_parts=np.array([3])), LargeMedia(cut=False)
    with caplog.at_level("INFO"):
        LargeMedia(cut=True).tell(sizes, 1000, 40)
        told.tell(sizes, 1000, 48)
        assert not caplog.records
        told.tell(sizes, 1000, 40)
        told.tell(sizes, 1000, 40)
    assert [record.getMessage() for record in caplog.records] == [
        "Pictures in tiles and clips stay whole, such as one of 48 patches, since encode does not say that it takes "
        "their parts apart (FlowModule.encodes_parts_apart)."
    ]
