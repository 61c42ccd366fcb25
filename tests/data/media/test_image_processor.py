"""Images get the sizes of Qwen's rule, and their pixels become patches in the order that encoders expect."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from flowtrain_lightning.data import ImageError, ImageProcessor, PackedMedia
from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from tests.data.support import IMAGES, write_image


def rule_of_qwen(height, width, block, least, most):
    """Restated with Python's own numbers from the published rule."""
    high, wide = round(height / block) * block, round(width / block) * block
    if high * wide > most:
        beta = math.sqrt(height * width / most)
        high = max(block, math.floor(height / beta / block) * block)
        wide = max(block, math.floor(width / beta / block) * block)
    elif high * wide < least:
        beta = math.sqrt(least / (height * width))
        high, wide = math.ceil(height * beta / block) * block, math.ceil(width * beta / block) * block
    return high, wide


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([14, 16]))
def test_sizes_follow_qwens_rule(height, width, patch):
    images = ImageProcessor(patch_size=patch)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ImageError, match="200 times"):
            images.size(height, width)
        return
    high, wide = rule_of_qwen(height, width, 2 * patch, 56 * 56, 28 * 28 * 1280)
    assert images.size(height, width) == (high // patch, wide // patch)


def test_a_known_image_has_the_known_number_of_tokens():
    assert ImageProcessor().size(295, 448) == (22, 32)
    assert ImageProcessor().rows_of_features((22, 32), (295, 448)) == 176


def test_patches_come_in_blocks_that_merge_into_one_row_of_features(tmp_path):
    images = ImageProcessor(1, 2, 4, 64, channels=1, mean=(0.0,), std=(1 / 255,))
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(2, 8)).save(tmp_path / "p.png")
    patches, grid = images.load(tmp_path / "p.png")
    assert grid == (2, 8)
    assert patches.dtype == np.float32
    np.testing.assert_allclose(patches[:, 0], [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15], atol=1e-4)


def test_inside_a_patch_the_order_is_channel_height_width(tmp_path):
    images = ImageProcessor(2, 1, 4, 64, mean=(0.0,) * 3, std=(1 / 255,) * 3)
    Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3)).save(tmp_path / "p.png")
    patches, _ = images.load(tmp_path / "p.png")
    np.testing.assert_allclose(patches[0], [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11], atol=1e-4)
    assert images.patch_dim == 12


@pytest.mark.parametrize("merge", [1, 2])
def test_images_of_one_size_can_be_had_whole(tmp_path, merge):
    images = ImageProcessor(2, merge, 4, 64, mean=(0.0,) * 3, std=(1 / 255,) * 3, fixed_size=(4, 8))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 8, 3), dtype=np.uint8)
    loaded = []
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        loaded.append(images.load(tmp_path / f"{number}.png"))
    grid = torch.tensor([grid for _, grid in loaded])
    patches = torch.from_numpy(np.concatenate([patches for patches, _ in loaded]))
    media = PackedMedia("image", patches, torch.tensor([0, 8, 16]), grid, 8, (8 // merge**2,) * 2)
    np.testing.assert_allclose(media.images(), pixels.transpose(0, 3, 1, 2), atol=1e-3)
    with pytest.raises(ValueError, match="differ in size"):
        replace(media, grid=torch.tensor([[2, 4], [4, 2]])).images()


def test_with_a_fixed_size_every_image_has_as_many_tokens(tmp_path):
    images = ImageProcessor(patch_size=14, merge_size=1, fixed_size=(336, 336))
    assert {images.size(*pixels) for pixels in ((10, 300), (4000, 100), (336, 336))} == {(24, 24)}
    assert images.rows_of_features((24, 24), (336, 336)) == 576
    write_image(tmp_path / "wide.png", 20, 90)
    assert images.load(tmp_path / "wide.png")[0].shape == (576, images.patch_dim)


def test_values_are_normalised_per_channel(tmp_path):
    Image.new("RGB", (4, 4), (255, 0, 255)).save(tmp_path / "p.png")
    images = ImageProcessor(2, 2, 16, 16, mean=(0.5, 0.5, 0.0), std=(0.5, 0.25, 2.0))
    patches, _ = images.load(tmp_path / "p.png")
    np.testing.assert_allclose(patches.reshape(4, 3, 4)[0], [[1.0] * 4, [-2.0] * 4, [0.5] * 4], atol=1e-6)


def test_pixels_are_bytes_that_become_the_same_numbers_wherever_they_are_normalised(tmp_path):
    every = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)  # every value in every channel
    Image.fromarray(every).save(tmp_path / "p.png")
    images = ImageProcessor(4, 2, 256, 256)
    pixels, grid, *_ = images.load_pixels(tmp_path / "p.png")
    assert pixels.dtype == np.uint8
    mean, std = (np.asarray(of_channels, np.float32) for of_channels in (images.mean, images.std))
    expected = images.cut((every.astype(np.float32) / np.float32(255) - mean) / std, grid)
    packed = pack_media([LoadedMedia(pixels, grid, 4, images.normalisation)])
    assert packed.pixels.dtype == torch.uint8
    assert np.array_equal(packed.patches.numpy(), expected)
    assert np.array_equal(images.load(tmp_path / "p.png")[0], expected)


def test_images_of_bytes_and_of_floats_are_packed_together(tmp_path):
    write_image(tmp_path / "p.png", 8, 8)
    images = ImageProcessor(4, 2, 64, 64)
    (pixels, grid, *_), (floats, _) = images.load_pixels(tmp_path / "p.png"), images.load(tmp_path / "p.png")
    packed = pack_media([LoadedMedia(pixels, grid, 1, images.normalisation), LoadedMedia(floats, grid, 1)])
    assert torch.equal(packed.patches[:4], packed.patches[4:])


def test_augmentation_sees_the_image_and_never_changes_its_size(tmp_path):
    write_image(tmp_path / "p.png", 16, 8)
    seen = []

    def crop(image):
        seen.append(image.size)
        return image.crop((0, 0, 3, 3))

    plain, grid = IMAGES.load(tmp_path / "p.png")
    cropped, same = IMAGES.load(tmp_path / "p.png", crop)
    assert seen == [(8, 16)]
    assert grid == same
    assert plain.shape == cropped.shape
    assert not np.allclose(plain, cropped)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"channels": 2}, "channels=2"),
        ({"mean": (0.0,)}, "1 values in mean"),
        ({"min_pixels": 100}, r"784 <= min_pixels"),
        ({"max_pixels": 1000}, "max_pixels=1000"),
        ({"fixed_size": (336, 27)}, r"fixed_size=\(336, 27\); both sides must be at least .* = 28"),
    ],
)
def test_a_rule_that_cannot_hold_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        ImageProcessor(**change)


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    write_image(tmp_path / "p.png", 4, 4)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"flowtrain-lightning\[data\]"):
        IMAGES.load(tmp_path / "p.png")
