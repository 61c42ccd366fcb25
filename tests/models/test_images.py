"""Pictures become what the model's own image processor makes of them, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from flowtrain_lightning.models import images_of

transformers = pytest.importorskip("transformers")


def qwen(folder: Path) -> Any:
    transformers.Qwen2VLConfig().save_pretrained(folder)
    processor = transformers.Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=40_000)
    processor.save_pretrained(folder)
    return processor


def llava(folder: Path, tower: str, side: int = 56) -> Any:
    config, processor = {
        "clip": (
            transformers.CLIPVisionConfig(image_size=56, patch_size=14),
            transformers.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        ),
        "siglip": (
            transformers.SiglipVisionConfig(image_size=side, patch_size=14),
            transformers.SiglipImageProcessorPil(size={"height": side, "width": side}),
        ),
    }[tower]
    transformers.LlavaConfig(vision_config=config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return processor


def write_blocks(folder: Path, height: int, width: int, mode: str = "RGB") -> Path:
    """Coloured blocks."""
    blocks = np.random.default_rng(0).integers(0, 255, (height // 8 + 1, width // 8 + 1, 4), dtype=np.uint8)
    pixels = blocks.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]
    Image.fromarray(pixels).convert(mode).save(folder / "blocks.png")
    return folder / "blocks.png"


def load(images: Any, path: Path) -> LoadedMedia:
    return images.load_pixels(path)


@pytest.mark.parametrize(
    ("height", "width", "mode"), [(300, 200, "RGB"), (40, 50, "RGB"), (123, 456, "L"), (80, 80, "RGBA")]
)
def test_patches_are_those_of_qwens_processor(tmp_path, height, width, mode):
    theirs = qwen(tmp_path)
    path = write_blocks(tmp_path, height, width, mode)
    ours = load(images_of(tmp_path), path)
    expected = theirs(Image.open(path), return_tensors="pt")
    assert expected["image_grid_thw"].tolist() == [[1, *ours.grid]]
    first, second = expected["pixel_values"].unflatten(1, (3, 2, -1)).unbind(2)  # a still image fills two frames
    assert first.equal(second)
    assert first.flatten(1).equal(torch.from_numpy(ours.patches))


@pytest.mark.parametrize(("tower", "height", "width"), [("clip", 80, 80), ("siglip", 80, 80), ("siglip", 40, 100)])
def test_images_are_those_of_the_towers_processor(tmp_path, tower, height, width):
    theirs = llava(tmp_path, tower)
    path = write_blocks(tmp_path, height, width)
    media = pack_media([load(images_of(tmp_path), path)])
    assert media.images().equal(theirs(Image.open(path), return_tensors="pt")["pixel_values"])


def test_what_is_left_beside_whole_patches_is_cut_off_as_by_the_tower(tmp_path):
    theirs = llava(tmp_path, "siglip", side=59)
    path = write_blocks(tmp_path, 40, 100)
    media = pack_media([load(images_of(tmp_path), path)])
    assert media.images().shape == (1, 3, 56, 56)
    assert media.images().equal(theirs(Image.open(path), return_tensors="pt")["pixel_values"][..., :56, :56])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"do_resize": False}, r"has do_resize=False, which cannot be followed"),
        ({"resample": 2}, r"has resample=2, which cannot be followed \(only resample=3\)"),
        ({"do_normalize": False, "rescale_factor": 1.0}, r"has rescale_factor=1.0, do_normalize=False, which"),
    ],
)
def test_pixels_that_are_made_otherwise_are_refused(tmp_path, change, words):
    qwen(tmp_path)
    transformers.Qwen2VLImageProcessorPil(**change).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        images_of(tmp_path)


def test_what_shall_be_otherwise_can_be_said(tmp_path):
    qwen(tmp_path)
    assert images_of(tmp_path).max_pixels == 40_000
    assert images_of(tmp_path, max_pixels=20_000).max_pixels == 20_000


def test_another_processor_is_refused_with_what_to_do(tmp_path):
    transformers.LlavaConfig().save_pretrained(tmp_path)
    transformers.Idefics3ImageProcessorPil().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a Idefics3ImageProcessor, but only .*images=ImageProcessor"):
        images_of(tmp_path)
