"""The media that a rank encodes: pieces of clips are those of the whole clip, and padding is one moment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("av")
pytest.importorskip("transformers")

from flowtrain_lightning.data import KeepFeatures, StepDataset, VideoProcessor
from tests.models.clips import video_data
from tests.packing.sizes import meeting_of, shard_of
from tests.tiny import IMAGES
from tests.tiny_videos import write_clip

SIZES = {"patch_size": IMAGES.patch_size, "merge_size": IMAGES.merge_size, "min_pixels": 64, "max_pixels": 4096}


@pytest.fixture
def steps(tmp_path: Path) -> StepDataset:
    """Steps of two samples, each with a clip of four moments, on ranks of an encoder that need each other."""
    for number in range(2):
        write_clip(tmp_path / f"{number}.mkv", 8, 16, 24, 4, seed=number)
        asked = [{"role": "user", "content": "<video>a"}, {"role": "assistant", "content": "b"}]
        line = json.dumps({"videos": [f"{number}.mkv"], "messages": asked})
        with (tmp_path / "train.jsonl").open("a") as file:
            file.write(line + "\n")
    videos = VideoProcessor(**SIZES, fps=4.0)
    data = video_data(tmp_path, "qwen2_5_vl", videos=videos, global_batch_size=2, token_budget=512)
    data.setup("fit")
    shard = shard_of(2, 1, encoder=0, meets={"encoder": meeting_of(2)})
    return replace(data.train_dataloader().steps, shard=shard)


def test_padding_is_the_first_moment_of_a_clip(steps: StepDataset) -> None:
    padding = steps.load(0, 0).padding_media["encoder"]
    (clip,) = padding.clips
    assert clip is not None
    assert (clip.moments, clip.before, clip.behind) == (1, 0, 3)
    assert len(padding.cu_seqlens) == 2


def test_pieces_of_a_clip_are_together_its_patches(steps: StepDataset) -> None:
    whole = replace(steps, shard=shard_of(1, 1, encoder=0)).load(0, 0)
    budget = 8 * int(whole.plan.sizes.media_patches.max()) // 4  # a piece of one moment
    cut = replace(steps, cuts_media=True, packing=replace(steps.packing, encoder_budget=budget))
    ranks = [replace(cut, shard=shard_of(2, 1, encoder=rank)).load(0, 0) for rank in range(2)]
    assert ranks[0].plan.sizes.media_items == 2
    found = {}
    for rank, batch in enumerate(ranks):
        for items, media in zip(batch.plan.batches["encoder"][rank], batch.media["encoder"], strict=True):
            lengths = np.diff(media.cu_seqlens) * 2  # rows of pixels: a moment has two frames
            assert all(clip.moments == 1 for clip in media.clips)
            found |= dict(zip(items.tolist(), media.pixels.split(lengths.tolist()), strict=True))
    assert len(found) == 8
    expected = [media.pixels for media in whole.media["encoder"]]
    pieces = np.concatenate([found[item].numpy() for item in sorted(found)])
    order = np.concatenate(whole.plan.batches["encoder"][0])
    assert order.tolist() == [0, 1]
    np.testing.assert_array_equal(pieces, np.concatenate([each.numpy() for each in expected]))


def test_the_features_of_a_piece_are_kept_by_its_clip_and_moments(steps: StepDataset, tmp_path: Path) -> None:
    store = KeepFeatures(tmp_path / "kept").store("eye")
    store.open()
    patches = int(steps.plan(0, 0).sizes.media_patches.max())
    packing = replace(steps.packing, encoder_budget=8 * patches // 4)
    cut = replace(steps, cuts_media=True, packing=packing, stores={"encoder": store}, shard=shard_of(1, 1, encoder=0))
    (first,) = (media.kept for media in cut.load(0, 0).media["encoder"])
    assert len(set(first.items)) == 8
    assert {item.rpartition("-")[2] for item in first.items} == {"1", "2", "3", "4"}
    assert first.missing == list(range(8))
    for item, rows in zip(first.items[:3], first.rows, strict=False):
        store.write(item, [torch.full((rows, 2), 3.0)])
    (media,) = cut.load(1, 0).media["encoder"]
    found = set(first.items[:3])
    assert [item in found for item in media.kept.items] == [each is not None for each in media.kept.features]
    assert len(media.rows) == 5
