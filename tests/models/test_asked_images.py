"""Images by a model's own processor, of which only what follows from sizes is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowtrain_lightning.data.batch import Tiles
from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from flowtrain_lightning.models.asked_images import AskedImages, asked_images

transformers = pytest.importorskip("transformers")

SIZES = ((60, 84), (300, 200), (200, 300))


def images() -> AskedImages:
    """Idefics 3's: tiles and a mask of their pixels."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    processor = Idefics3ImageProcessorPil(size={"longest_edge": 224}, max_image_size={"longest_edge": 56})
    config = transformers.Idefics3Config(vision_config={"patch_size": 14})
    return asked_images(processor, ("pixel_values", "pixel_attention_mask"), config)


def bytes_of(asked: dict[str, Any]) -> int:
    tensors = [value for value in asked.values() if isinstance(value, torch.Tensor) and not value.is_meta]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_a_size_that_was_asked_keeps_no_pixels_and_no_mask():
    found = images()
    assert all(bytes_of(found.asked(*size)) < 1000 for size in SIZES)


@pytest.mark.parametrize("size", SIZES)
def test_an_encoder_is_given_what_the_processor_makes(size):
    found = images()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8))
    expected = found.given(image)
    media = LoadedMedia(found.values(image, found.size(*size), size), found.size(*size), 1, size=size)
    (given,) = found.inputs.of_items(pack_media([media]))
    assert given.keys() == {"pixel_values", "pixel_attention_mask"}
    for name, value in given.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, check_dtype=name != "pixel_values")
        assert value.is_contiguous()


def test_tiles_of_a_large_image_are_taken_apart_from_what_has_none():
    processor = transformers.GotOcr2ImageProcessorPil(
        size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    found = asked_images(processor, ("pixel_values",), transformers.AyaVisionConfig())
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (150, 100, 3), dtype=np.uint8))
    expected = found.given(image)  # and the number of tiles, one for all of them
    tiles = len(expected["pixel_values"])
    assert tiles > 2
    whole = LoadedMedia(
        found.values(image, found.size(150, 100), (150, 100)),
        found.size(150, 100),
        tiles,
        size=(150, 100),
        tiles=Tiles(tiles),
    )
    for number in range(tiles):
        (given,) = found.inputs.of_items(pack_media([whole.between(number, number + 1)]))
        torch.testing.assert_close(
            given["pixel_values"], expected["pixel_values"][number : number + 1], rtol=0, atol=0, check_dtype=False
        )
