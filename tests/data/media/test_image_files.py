"""An image is used as a person sees it, whatever its format keeps; what cannot be shown so is refused in a sentence."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps, TiffImagePlugin

from flowtrain_lightning.data import ImageError
from flowtrain_lightning.data.media.image_files import decode, flatten, read_header
from flowtrain_lightning.data.media.media_files import EncodedMedia
from tests.data.png import COLOUR, GREY, chunk, png_of
from tests.data.support import write_image

RAMP = np.linspace(0, 1, 24 * 40).reshape(24, 40)
"""A picture from black to white, as shares of white."""

TURNED = ("jpg", "tif", "png", "webp", "avif")


def shown(file) -> np.ndarray:
    """``[height, width, 3]`` what a person sees; its header says the same size."""
    image = flatten(decode(file), "RGB")
    header = read_header(file)
    assert (header.height, header.width) == (image.height, image.width)
    return np.asarray(image).astype(int)


def grey(file) -> np.ndarray:
    pixels = shown(file)
    assert (pixels == pixels[:, :, :1]).all()
    return pixels[:, :, 0]


@pytest.mark.parametrize("suffix", ["png", "tif", "jp2", "pgm"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path, suffix):
    Image.fromarray((RAMP * 65535).round().astype(np.uint16)).save(tmp_path / f"p.{suffix}")
    np.testing.assert_allclose(grey(tmp_path / f"p.{suffix}"), RAMP * 255, atol=1)


def test_a_tiff_whose_white_is_zero_is_not_shown_as_a_negative(tmp_path):
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    Image.fromarray((RAMP * 65535).round().astype(np.uint16)).save(tmp_path / "p.tif", tiffinfo=tags)
    content = bytearray((tmp_path / "p.tif").read_bytes())
    entry = content.index(struct.pack("<HHI", 262, 3, 1))
    content[entry + 8 : entry + 10] = struct.pack("<H", 0)
    np.testing.assert_allclose(grey(EncodedMedia("negative", bytes(content))), 255 - RAMP * 255, atol=1)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_numbers_without_black_and_white_are_refused_by_their_header(tmp_path, dtype):
    Image.fromarray((RAMP * 1000).astype(dtype)).save(tmp_path / "p.tif")
    for use in (read_header, decode):
        with pytest.raises(ImageError, match="do not say what is black and what is white; save it with 8 or 16 bits"):
            use(tmp_path / "p.tif")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", TURNED)
def test_a_photo_is_turned_alike_in_every_format(tmp_path, suffix, orientation):
    stored = Image.fromarray((np.kron([[0.1, 0.9, 0.3]], np.ones((16, 16))) * 255).astype(np.uint8)).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"quality": 100} | ({"lossless": True} if suffix == "webp" else {})
    stored.save(tmp_path / f"p.{suffix}", exif=exif.tobytes(), **lossless)
    marked = stored.copy()
    marked.getexif()[0x0112] = orientation
    np.testing.assert_allclose(shown(tmp_path / f"p.{suffix}"), np.asarray(ImageOps.exif_transpose(marked)), atol=4)


def test_a_png_is_turned_also_where_its_orientation_stands_behind_the_pixels(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray((RAMP * 255).astype(np.uint8)).save(tmp_path / "p.png")
    content, body = (tmp_path / "p.png").read_bytes(), exif.tobytes().removeprefix(b"Exif\0\0")
    end = content.rindex(b"IEND") - 4
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    np.testing.assert_array_equal(
        grey(EncodedMedia("late", content[:end] + chunk + content[end:])),
        np.rot90((RAMP * 255).astype(np.uint8), k=-1),
    )


def test_cmyk_has_the_colours_that_were_printed(tmp_path):
    Image.new("RGB", (16, 16), (200, 30, 60)).convert("CMYK").save(tmp_path / "p.jpg", quality=100)
    np.testing.assert_allclose(shown(tmp_path / "p.jpg")[0, 0], (200, 30, 60), atol=4)


def test_transparent_colours_lie_on_white_in_every_mode(tmp_path):
    clear = {
        "palette.gif": (Image.new("P", (4, 4), 0), {"transparency": 0}),
        "palette.png": (Image.new("P", (4, 4), 0), {"transparency": 0}),
        "grey.png": (Image.new("L", (4, 4), 7), {"transparency": 7}),
        "colour.png": (Image.new("RGB", (4, 4), (1, 2, 3)), {"transparency": (1, 2, 3)}),
        "alpha.png": (Image.new("LA", (4, 4), (0, 0)), {}),
        "deep.png": (Image.fromarray(np.full((4, 4), 700, np.uint16)), {"transparency": 700}),
        "alpha.webp": (Image.new("RGBA", (4, 4), (0, 0, 0, 0)), {"lossless": True}),
    }
    for name, (image, settings) in clear.items():
        image.save(tmp_path / name, **settings)
        assert (shown(tmp_path / name) == 255).all(), name


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_transparent_grey_of_a_png_of_few_bits_lies_on_white(depth):
    ends = np.array([[[0], [2**depth - 1], [1]]])
    content = png_of(ends, GREY, depth, [(b"tRNS", struct.pack(">H", 1))])
    np.testing.assert_array_equal(grey(EncodedMedia("clear", content))[0], [0, 255, 255])


def test_a_png_with_a_transparent_colour_of_16_bits_is_refused():
    content = png_of(np.array([[[1, 2, 3]]]), COLOUR, 16, [(b"tRNS", struct.pack(">3H", 1, 2, 3))])
    with pytest.raises(ImageError, match="colours of 16 bits of which one is transparent; save it with an alpha"):
        read_header(EncodedMedia("clear", content))


@pytest.mark.parametrize("suffix", ["gif", "png", "webp", "avif", "tif"])
def test_of_an_animated_image_the_first_picture_is_used_and_its_header_says_so(tmp_path, suffix):
    first, second = Image.new("RGB", (16, 16), (250, 0, 0)), Image.new("RGB", (16, 16), (0, 0, 250))
    first.save(tmp_path / f"p.{suffix}", save_all=True, append_images=[second])
    first.save(tmp_path / f"still.{suffix}")
    assert read_header(tmp_path / f"p.{suffix}").animated
    assert not read_header(tmp_path / f"still.{suffix}").animated
    np.testing.assert_allclose(shown(tmp_path / f"p.{suffix}")[5, 5], (250, 0, 0), atol=6)


@pytest.mark.parametrize("side", [10_000, 20_000])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(side):
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(ImageError, match=f"{side * side} pixels"):
        read_header(EncodedMedia("bomb", content))


def test_a_png_that_is_damaged_in_its_pixels_is_refused(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "p.png", compress_level=0)
    content = bytearray((tmp_path / "p.png").read_bytes())
    content[len(content) // 2] ^= 4
    with pytest.raises(ImageError, match="the checksum of a part of the PNG file is wrong"):
        decode(EncodedMedia("flipped", bytes(content)))


@pytest.mark.parametrize("suffix", TURNED)
def test_a_header_is_read_without_decoding(tmp_path, monkeypatch, suffix):
    write_image(tmp_path / f"p.{suffix}", 5, 9)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("the image was decoded"))
    assert read_header(tmp_path / f"p.{suffix}") == (5, 9, False)


def test_bad_images_are_told_apart(tmp_path):
    (tmp_path / "text.jpg").write_text("no image")
    write_image(tmp_path / "whole.jpg", 64, 64)
    (tmp_path / "half.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:3000])
    with pytest.raises(ImageError, match="no image that can be read; known are AVIF"):
        read_header(tmp_path / "text.jpg")
    assert read_header(tmp_path / "half.jpg") == (64, 64, False)
    with pytest.raises(ImageError, match="cannot be decoded"):
        decode(tmp_path / "half.jpg")


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path, words in (
        (tmp_path / "pipe.png", "a pipe or a device"),
        (tmp_path, "it is a folder"),
        (tmp_path / "none.png", "there is no such file"),
        (tmp_path / ("a" * 300), "cannot be opened"),
        (tmp_path / "a\0b", "cannot be opened"),
    ):
        with pytest.raises(ImageError, match=words):
            read_header(path)


def test_programs_are_not_run_for_an_image():
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "EPS")
    with pytest.raises(ImageError, match="no image that can be read"):
        read_header(EncodedMedia("drawing", file.getvalue()))
