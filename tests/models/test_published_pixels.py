"""Of images of any shape and mode, pixels and the number of tokens are those of each family's own processor."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from flowtrain_lightning.data.loading.collate import pack_media

transformers = pytest.importorskip("transformers")

from flowtrain_lightning.models import tile_images  # noqa: E402
from flowtrain_lightning.models.processor import Processor, processor_of  # noqa: E402
from tests.models.published_sizes import IN_PUBLISHED_SIZE  # noqa: E402

SHAPES = ((5, 150), (150, 5), (1, 1), (3, 2), (27, 43), (448, 448), (500, 333), (200, 900))
"""Height and width in pixels."""

FEW_TILES = {"internvl": (60, 60), "smolvlm": (20, 160)}
"""Height and width of an image of which few tiles are made; elsewhere any is."""

LARGE = ("smolvlm", "internvl", "paligemma")
"""Of which the pixels take their time: SmolVLM scales every image up to 2048, and cuts it into tiles of 512."""

FAMILIES = [pytest.param(name, marks=pytest.mark.full if name in LARGE else ()) for name in IN_PUBLISHED_SIZE]

ORIENTATION = 0x0112  # EXIF tag


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    @cache
    def both(family: str) -> Both:
        if family == "smolvlm":  # it spells out how many frames a video has, by a package that nothing here needs
            module = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
            module.num2words = module.num2words or str
        folder = tmp_path_factory.mktemp(family)
        return Both(IN_PUBLISHED_SIZE[family].save(folder), processor_of(folder))

    return both


class Seen(NamedTuple):
    """What is made of an image: ``[patches or tiles, ...]`` pixels, and how many tokens stand for it."""

    pixels: torch.Tensor
    tokens: int


class Both(NamedTuple):
    """A family's processor of Hugging Face, and ours from its folder."""

    theirs: Any
    ours: Processor

    def expected(self, path: Path) -> Seen:
        """By the processor, of an image that is upright and of 8 bits, as it takes them."""
        place = self.theirs.image_token
        image = eight_bits(ImageOps.exif_transpose(Image.open(path)))
        found = self.theirs(text=[place], images=[[image]], return_tensors="pt")
        number = self.ours.template.image_id(self.ours.tokenizer)
        return Seen(found["pixel_values"], int((found["input_ids"] == number).sum()))

    def found(self, path: Path) -> Seen:
        """In the processor's order."""
        images = self.ours.images
        loaded = images.load_pixels(path)
        if images.fixed_size is None:  # a still image fills two frames
            patches = torch.from_numpy(loaded.patches)
            return Seen(patches.view(len(patches), 3, 1, -1).repeat(1, 1, 2, 1).flatten(1), loaded.rows)
        each = math.prod(loaded.grid) // images.merge_size**2  # rows of features, if each block of patches makes one
        media = pack_media([loaded._replace(rows=each)])
        return Seen(tile_images(media, images.fixed_size[0] // images.patch_size), loaded.rows)

    def check(self, path: Path) -> None:
        found, expected = self.found(path), self.expected(path)
        pixels = expected.pixels
        if self.ours.images.fixed_size is not None:  # the tower cuts off what is left beside whole patches
            side = pixels.shape[-1] // self.ours.images.patch_size * self.ours.images.patch_size
            pixels = pixels.flatten(end_dim=-4)[..., :side, :side]
        assert found.tokens == expected.tokens, path.name
        assert found.pixels.equal(pixels), path.name


def eight_bits(image: Image.Image) -> Image.Image:
    """A grey image of 16 bits with 8, of which the processors know nothing: they cut all above 255 off."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray(np.rint(np.asarray(image).astype(np.float64) / 65535 * 255).astype(np.uint8))


def drawn(height: int, width: int) -> Image.Image:
    """Coloured blocks of many opacities."""
    blocks = np.random.default_rng(height).integers(0, 256, (height // 8 + 1, width // 8 + 1, 4), dtype=np.uint8)
    return Image.fromarray(blocks.repeat(8, axis=0).repeat(8, axis=1)[:height, :width])


def write_shapes(folder: Path, shapes: Iterable[tuple[int, int]]) -> Iterator[Path]:
    for height, width in shapes:
        path = folder / f"{height} x {width}.png"
        drawn(height, width).convert("RGB").save(path)
        yield path


def write_modes(folder: Path, height: int = 97, width: int = 131) -> Iterator[Path]:
    """Images of one size in all modes that PNG and JPEG have, and one that lies on its side."""
    image = drawn(height, width)
    for mode in ("1", "L", "LA", "P", "RGBA"):
        path = folder / f"{mode}.png"
        image.convert(mode).save(path)
        yield path
    for mode, colour in (("P", 3), ("RGB", image.getpixel((9, 9))[:3])):
        path = folder / f"{mode} with a colour that is transparent.png"
        image.convert(mode).save(path, transparency=colour)
        yield path
    for mode in ("L", "RGB", "CMYK"):
        path = folder / f"{mode}.jpg"
        image.convert(mode).save(path)
        yield path
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    image.convert("RGB").save(folder / "on its side.jpg", exif=exif)
    yield folder / "on its side.jpg"
    grey = np.random.default_rng(0).integers(0, 65536, (height, width), dtype=np.uint16)
    Image.fromarray(grey).save(folder / "16 bits.png")
    yield folder / "16 bits.png"


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_every_shape_have_pixels_and_tokens_of_the_processor(both, tmp_path, family):
    for path in write_shapes(tmp_path, SHAPES):
        both(family).check(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_every_mode_have_pixels_and_tokens_of_the_processor(both, tmp_path, family):
    for path in write_modes(tmp_path, *FEW_TILES.get(family, ())):
        both(family).check(path)


def test_long_thin_images_have_pixels_and_tokens_of_the_processor_of_smolvlm(both, tmp_path):
    for path in write_shapes(tmp_path, SHAPES[:2]):
        both("smolvlm").check(path)
