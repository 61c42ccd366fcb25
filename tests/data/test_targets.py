"""Images that are to be generated: as records name them, and packed with random numbers that belong to each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowtrain_lightning.data import DataError, FlowDataModule, LoadedMedia, PackedMedia, PackedTargets
from flowtrain_lightning.data.batch import GeneratedItem
from flowtrain_lightning.data.loading.collate import pack_media
from tests.data.support import records_in
from tests.exactness.drawing import ROWS, Drawing, drawings, write_drawings
from tests.tiny import IMAGES, tiny_data

ITEMS = (GeneratedItem(0, 1, 2), GeneratedItem(4, 0, 2), GeneratedItem(2, 3, 2))


def packed(*items: GeneratedItem, step: int = 0) -> PackedTargets:
    """Pictures of sizes that follow from their places."""
    grids = [(2 * (1 + item.sample % 3), 4) for item in items]
    pictures = [
        LoadedMedia(np.ones((high * wide, IMAGES.patch_dim), np.float32), (high, wide), high * wide // 4)
        for high, wide in grids
    ]
    return PackedTargets(with_items(pack_media(pictures), items), 7, 1, step)


def with_items(media: PackedMedia, items: tuple[GeneratedItem, ...]) -> PackedMedia:
    return type(media)(**{**vars(media), "items": items})


def record_of(folder: Path, **part: object) -> Path:
    """A record whose answer is an image that is said of as ``part`` has it."""
    Image.new("RGB", (16, 16)).save(folder / "a.png")
    content = [{"type": "image", "path": "a.png", **part}, {"type": "text", "text": "there"}]
    turns = [{"role": "user", "content": "draw"}, {"role": "assistant", "content": content}]
    (folder / "train.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return folder / "train.jsonl"


def test_random_numbers_are_those_of_the_item_whatever_it_is_packed_with():
    together = packed(*ITEMS)
    alone = [packed(item) for item in ITEMS]
    assert torch.equal(together.normal_like("a"), torch.cat([each.normal_like("a") for each in alone]))
    assert torch.equal(together.uniform("a"), torch.cat([each.uniform("a") for each in alone]))
    assert len(together.uniform("a").unique()) == len(ITEMS)


def test_other_names_steps_and_items_have_other_random_numbers():
    drawn = [packed(ITEMS[0]).uniform("a"), packed(ITEMS[0]).uniform("b"), packed(ITEMS[0], step=1).uniform("a")]
    assert len(torch.stack(drawn).unique()) == 3


def test_random_numbers_are_the_same_in_every_precision():
    items = packed(*ITEMS)
    exact = items.with_values(items.values.double())
    assert exact.normal_like("a").dtype == torch.float64
    assert torch.equal(exact.normal_like("a").float(), items.normal_like("a"))


def test_what_is_said_of_an_item_is_repeated_for_its_patches_and_rows():
    items = packed(*ITEMS)
    numbers = torch.tensor([5, 6, 7])
    assert items.per_patch(numbers).tolist() == np.repeat([5, 6, 7], items.patches).tolist()
    assert items.per_row(numbers).tolist() == [5, 5, 6, 6, 7, 7]


def test_items_of_one_size_are_images_too():
    items = packed(ITEMS[0], ITEMS[0])
    assert items.images().shape == (2, 3, 8, 16)


def test_a_part_of_a_turn_names_an_image_to_be_generated(tmp_path):
    (found,) = records_in(record_of(tmp_path, generate=True))
    assert (found.media, found.generated) == ((tmp_path / "a.png",), {0})
    (found,) = records_in(record_of(tmp_path, generate=False))
    assert found.generated == set()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "video", "generate": True}, "generate=True; only an image may be generated"),
        ({"generate": "yes"}, "generate='yes'; only an image may be generated"),
        ({"path": None, "generate": True}, "an image to be generated names no file in its own part"),
    ],
)
def test_other_parts_that_say_so_are_refused(tmp_path, part, words):
    with pytest.raises(DataError, match=words):
        records_in(record_of(tmp_path, **part))


def test_a_model_that_generates_nothing_cannot_read_such_records(tmp_path):
    record_of(tmp_path, generate=True)
    with pytest.raises(DataError, match=r"has an image to be generated, but the model .* has no half that generates"):
        tiny_data(tmp_path).setup("fit")


def steps_of(folder: Path) -> FlowDataModule:
    data = drawings(folder)
    data.read_as(Drawing())
    data.setup("fit")
    return data


def test_an_image_to_be_generated_has_places_among_the_tokens_and_in_the_index(tmp_path):
    write_drawings(tmp_path)
    measured, kept = (steps_of(tmp_path).train_dataloader().steps.load(0, 0) for _ in range(2))
    for batch in (measured, kept):
        assert sum(packed.generated for packed in batch.microbatches) == 5
        for packed_batch in batch.microbatches:
            positions = packed_batch.condition_positions
            assert len(positions) == ROWS * packed_batch.generated
            assert (packed_batch.labels[positions[:-1]] < 0).all()
    assert (measured.plan.sizes.media_modality == kept.plan.sizes.media_modality).all()
