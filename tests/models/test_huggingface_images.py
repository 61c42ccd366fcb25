"""Pixels and sizes are those of the model's own image processor, tiles included."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.data.media.image_files import ImageError

transformers = pytest.importorskip("transformers")

from flowtrain_lightning.models import HuggingFaceImages, images_of, tile_images  # noqa: E402
from tests.models.processors import PUBLISHED  # noqa: E402

FAMILIES = ("llava", "internvl", "gemma3", "smolvlm", "llava_onevision")
OPTIONS: dict[str, dict[str, Any]] = {"internvl": {"crop_to_patches": True}}
"""What the processors of Hugging Face tell their image processors."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, HuggingFaceImages]]:
    """Hugging Face's image processor of a family, and ours from its folder."""
    made: dict[str, tuple[Any, HuggingFaceImages]] = {}

    def opened(family: str) -> tuple[Any, HuggingFaceImages]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            processor = PUBLISHED[family].image_processor()
            for part in (PUBLISHED[family].config(), processor):
                part.save_pretrained(folder)
            made[family] = processor, images_of(folder)
        return made[family]

    return opened


def write(folder: Path, height: int, width: int, mode: str = "RGB") -> Path:
    pixels = np.random.default_rng(height).integers(0, 255, (height, width, 4), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(folder / "image.png")
    return folder / "image.png"


def tiles_of(images: HuggingFaceImages, path: Path, *, alone: bool = True) -> torch.Tensor:
    loaded = images.load_pixels(path, alone=alone)
    each = math.prod(loaded.grid) // images.merge_size**2  # rows of features, if each block of patches makes one
    return tile_images(pack_media([loaded._replace(rows=each)]), images.fixed_size[0] // images.patch_size)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("height", "width", "mode"),
    [
        (56, 56, "RGB"),
        (90, 130, "RGB"),
        (300, 60, "RGB"),
        (20, 25, "L"),
        (80, 70, "RGBA"),
        (33, 400, "P"),
        (1, 300, "RGB"),
        (900, 2, "L"),
    ],
)
def test_pixels_are_equal_to_the_bit(opened, tmp_path, family, height, width, mode):
    theirs, ours = opened(family)
    path = write(tmp_path, height, width, mode)
    found = tiles_of(ours, path)
    expected = theirs(Image.open(path), return_tensors="pt", **OPTIONS.get(family, {}))["pixel_values"]
    assert found.equal(expected.reshape(found.shape))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(height=st.integers(1, 500), width=st.integers(1, 500))
def test_how_many_tiles_there_are_is_known_from_the_size_alone(opened, family, height, width):
    theirs, ours = opened(family)
    image = Image.fromarray(np.zeros((height, width, 3), np.uint8))
    found = theirs(image, return_tensors="np", **OPTIONS.get(family, {}))["pixel_values"]
    tiles = found.reshape(-1, *found.shape[-3:]).shape[0]
    high = ours.fixed_size[0] // ours.patch_size
    assert ours.size(height, width) == (high * tiles, high)


@pytest.mark.parametrize(("height", "width"), [(56, 56), (90, 130), (60, 21)])
def test_of_several_images_onevision_sees_one_square_tile_each(opened, tmp_path, height, width):
    theirs, ours = opened("llava_onevision")
    path = write(tmp_path, height, width)
    image = Image.open(path)
    expected = theirs([[image, image, image]], return_tensors="pt")["pixel_values"][0]
    assert tiles_of(ours, path, alone=False).equal(expected)


def test_images_that_a_processor_would_swell_beyond_bounds_are_refused(opened, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000_000)
    for family, alone in (("llava", True), ("llava_onevision", False)):
        with pytest.raises(ImageError, match=r"of which the model's image processor would make \d{7} pixels"):
            opened(family)[1].size(1, 1100, alone=alone)
        assert opened(family)[1].size(1, 300, alone=alone)
    assert opened("llava_onevision")[1].size(1, 1100)


def test_an_augmented_image_keeps_its_tiles(opened, tmp_path):
    _, ours = opened("internvl")
    path = write(tmp_path, 60, 300)
    plain, grid = ours.load(path)
    cropped, same = ours.load(path, lambda image: image.crop((0, 0, 50, 50)))
    assert grid == same
    assert plain.shape == cropped.shape


def test_images_of_one_size_have_no_bounds(tmp_path):
    for part in (PUBLISHED["internvl"].config(), PUBLISHED["internvl"].image_processor()):
        part.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="max_pixels mean nothing"):
        images_of(tmp_path, max_pixels=1000)


def test_what_is_done_to_images_is_part_of_the_fingerprint(opened):
    found = {opened(family)[1].fingerprint for family in FAMILIES}
    assert len(found) == len(FAMILIES)
    assert "fixed_size=(56, 56)" in repr(opened("internvl")[1])
