"""Image files of all kinds, many of them damaged, and what becomes of each. `make proofs` runs 10,000 of them.

What the data room yields is compared with the pixels that were written, where these are known, and else with the
plainest use of Pillow.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
import tempfile
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from flowtrain_lightning.data import DataError, ImageProcessor, JsonFile
from flowtrain_lightning.data.loading.sample_loader import SampleLoader
from flowtrain_lightning.data.sources.measuring import measured_media
from flowtrain_lightning.data.sources.record_store import locations_of
from tests import trials
from tests.data.png import drawn_png
from tests.data.support import MEASURE, TEMPLATE, Letters

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "I;16", "F", "LAB", "HSV")
FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP", "AVIF", "PPM", "JPEG2000", "TGA", "ICO", "PDF", "EPS")
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "JPEG": ({}, {"progressive": True}, {"quality": 100, "subsampling": 0}),
    "TIFF": (
        {}, {"compression": "tiff_lzw"}, {"compression": "tiff_adobe_deflate"}, {"compression": "packbits"},
        {"compression": "group4"}, {"big_tiff": True},
    ),
    "WEBP": ({}, {"lossless": True}, {"lossless": True, "exact": True}),
    "GIF": ({}, {"transparency": 0}, {"interlace": 0}),
    "PNG": ({}, {"transparency": 0}, {"bits": 4}),
}  # fmt: skip
"""Some ways to write a format."""

ORIENTATION = 0x0112  # EXIF tag
SAME_SIZE = ImageProcessor(patch_size=1, merge_size=1, min_pixels=1, max_pixels=1 << 26)
"""Each pixel is a patch, and no image is scaled."""

ROUNDING = 2.0
"""Of 255: colours and opacity of 16 bits are each rounded to 8 before one is laid on white by the other."""

Pixels = NDArray[np.float64]


class Drawn(NamedTuple):
    """An image file.

    Attributes:
        content: its bytes.
        pixels: ``[height, width, 3]`` what a person sees, 0 to 255; None where it is not known.
        whole: nothing has happened to it.
    """

    content: bytes
    pixels: Pixels | None = None
    whole: bool = True


# ---- whole ones -----------------------------------------------------------------------------------------------------


def drawn_image(chance: random.Random) -> Drawn:
    """An image file of a kind drawn by chance."""
    if chance.random() < 0.3:
        content, pixels = drawn_png(chance)
        return Drawn(content, pixels)
    while True:
        try:
            return _by_pillow(chance)
        except Exception:  # Pillow cannot write such a one
            continue


def _by_pillow(chance: random.Random) -> Drawn:
    height, width = chance.randint(1, 24), chance.randint(1, 12)
    pixels = np.random.default_rng(chance.randrange(1 << 30)).integers(0, 256, (height, width, 3), np.uint8)
    mode, kind = chance.choice(MODES), chance.choice(FORMATS)
    image, known = _in_mode(Image.fromarray(pixels), mode)
    settings = dict(chance.choice(SETTINGS.get(kind, ({},))))
    orientation = chance.randrange(10)
    if chance.random() < 0.5:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        settings["exif"] = exif.tobytes()
    if chance.random() < 0.2:
        settings |= {"save_all": True, "append_images": [image.rotate(180)]}
    if kind == "AVIF":  # in writing other than this, Pillow can end the whole process
        image, settings = image.convert("RGB"), {}
    file = io.BytesIO()
    image.save(file, kind, **settings)
    if known is None or kind not in ("PNG", "TIFF", "BMP", "PPM") or "transparency" in settings or "bits" in settings:
        return Drawn(file.getvalue())
    keeps = "exif" in settings and kind in ("PNG", "TIFF") and 1 <= orientation <= 8
    return Drawn(file.getvalue(), upright(known, orientation if keeps else 1))


def _in_mode(image: Image.Image, mode: str) -> tuple[Image.Image, Pixels | None]:
    """The image in another mode, and what a person sees then, where that needs no word of Pillow's."""
    grey = np.asarray(image)[:, :, 0].astype(np.float64)
    known: dict[str, Pixels] = {"RGB": np.asarray(image).astype(np.float64), "1": np.where(grey < 128, 0.0, 255.0)}
    known |= {"L": grey, "I;16": grey, "CMYK": np.asarray(image).astype(np.float64)}
    seen = known.get(mode)
    if seen is not None and seen.ndim == 2:
        seen = np.repeat(seen[:, :, None], 3, axis=2)
    if mode == "I;16":
        return Image.fromarray(grey.astype(np.uint16) * 257), seen
    if mode == "1":
        return Image.fromarray(grey >= 128), seen
    if mode == "L":
        return Image.fromarray(grey.astype(np.uint8)), seen
    if mode == "LAB":
        return Image.new("LAB", image.size), seen
    if mode == "PA":
        return image.convert("P").convert("PA"), seen
    return (image.convert("L") if mode in ("I", "F") else image).convert(mode), seen


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """``[height, width, ...]`` turned as EXIF says."""
    turns = {
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: a.swapaxes(0, 1)[:, ::-1],
        7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
        8: lambda a: a.swapaxes(0, 1)[::-1],
    }
    return turns.get(orientation, lambda a: a)(pixels)


# ---- what happens to them -------------------------------------------------------------------------------------------


def broken_image(chance: random.Random) -> Drawn:
    """An image file, often with some bytes changed, left out or added, or with a header that lies."""
    drawn = drawn_image(chance)
    content = bytearray(drawn.content)
    way = chance.randrange(8)
    if way == 0:
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif way == 1:
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(min(64, len(content)))] = chance.randrange(256)
    elif way == 2:
        content = content[: chance.randrange(len(content))]
    elif way == 3:
        content[chance.randrange(len(content)) :] = chance.randbytes(chance.randrange(40))
    elif way == 4:
        start = chance.randrange(len(content))
        del content[start : start + chance.randint(1, 20)]
    elif way == 5:
        content = bytearray(
            _of_size(chance, chance.choice(((0, 5), (5, 0), (0, 0), (12_000, 12_000), (65_535, 65_535))))
        )
    whole = bytes(content) == drawn.content
    checked = drawn.content.startswith(b"\x89PNG") and way != 5  # what is damaged there is refused or not used
    return Drawn(bytes(content), drawn.pixels if whole or checked else None, whole)


def _of_size(chance: random.Random, size: tuple[int, int]) -> bytes:
    """A file whose header speaks of a size that its pixels do not have."""
    width, height = size
    file, kind = io.BytesIO(), chance.choice(("PNG", "GIF", "BMP", "JPEG"))
    Image.new("L", (7, 9)).save(file, kind)
    content = bytearray(file.getvalue())
    if kind == "PNG":
        content[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
        content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    elif kind == "GIF":
        content[6:10] = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    elif kind == "BMP":
        content[18:26] = width.to_bytes(4, "little") + height.to_bytes(4, "little")
    else:
        start = content.index(b"\xff\xc0") + 5
        content[start : start + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(content)


# ---- what becomes of them -------------------------------------------------------------------------------------------


def judge(drawn: Drawn, file: Path) -> str:
    """Writes a data file with a record that holds the image, measures it in both ways there are, and loads it.

    Returns:
        ``"refused"`` in a sentence with file and record, or ``"shown"`` as a person sees it.

    Raises:
        AssertionError: it is neither.
    """
    address = f"data:application/octet-stream;base64,{base64.b64encode(drawn.content).decode()}"
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "This."}]
    file.write_text(json.dumps({"messages": turns, "images": [address]}) + "\n")
    store = JsonFile(file)
    (record,) = store.records(0, locations_of(store))
    loader = SampleLoader(None, Letters(), TEMPLATE, SAME_SIZE)  # type: ignore[arg-type]
    measure = replace(MEASURE, images=SAME_SIZE)
    said, shown, rows = "", None, 0
    try:
        rows = int(measured_media(record, measure).rows.sum())
        loaded = loader.media(record, 0, 0, rows, 0)
        shown = loaded.pixels.reshape(*loaded.grid, 3).astype(np.float64)
    except DataError as error:
        said = str(error)
    assert measured_media(record, replace(measure, unreadable="drop")).usable == (shown is not None), said
    if shown is None:
        assert drawn.pixels is None or not drawn.whole or "save it with" in said, f"it is whole: {said}"
        assert said.startswith(f"{file}, record 1: image of the record cannot be used: "), said
        assert len(said.split()) > 12, said
        return "refused"
    assert rows == shown.shape[0] * shown.shape[1]
    expected = drawn.pixels if drawn.pixels is not None else _by_pillow_alone(drawn.content)
    assert shown.shape == expected.shape, f"{shown.shape} instead of {expected.shape}"
    assert np.abs(shown - expected).max(initial=0) <= ROUNDING, f"off by {np.abs(shown - expected).max()} of 255"
    return "shown"


def _by_pillow_alone(content: bytes) -> Pixels:
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        if image.mode in ("I", "I;16", "I;16L", "I;16B"):
            values = np.asarray(image).astype(np.float64) / 257
            values[np.asarray(image) == image.info.get("transparency", -1)] = 255
            tag = 1 if image.format == "TIFF" else image.getexif().get(ORIENTATION, 1)
            return upright(np.repeat(values.clip(0, 255)[:, :, None], 3, axis=2), tag)
        colours = np.asarray(ImageOps.exif_transpose(image).convert("RGBA")).astype(np.float64)
    alpha = colours[:, :, 3:] / 255
    return colours[:, :, :3] * alpha + 255 * (1 - alpha)


def trial(seed: int, folder: Path) -> str:
    """Draws an image file, and says what becomes of it; see `judge`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd tags
        return judge(broken_image(random.Random(seed)), folder / "broken.jsonl")


def main() -> int:
    """Runs the trials that were not run yet."""
    with tempfile.TemporaryDirectory(prefix="broken-images-") as name:
        return trials.main("broken images", lambda seed: trial(seed, Path(name)))


if __name__ == "__main__":
    sys.exit(main())
