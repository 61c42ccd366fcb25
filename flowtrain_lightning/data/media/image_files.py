"""Images as files or bytes: opened, checked, turned upright, and brought to 8 bits as a person sees them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.media.media_files import MediaError, MediaFile, opened

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are read. Pillow knows others, but some start programs, and some accept nearly any bytes as an image."""

_EIGHT_BITS = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"}
_SIXTEEN_BITS = {"I;16", "I;16L", "I;16B"}
_SCALED_TO_SIXTEEN_BITS = {"PNG", "PPM"}
"""Whose images of mode ``I`` range from 0 to 65535; elsewhere nothing says what is white."""

_ORIENTATION = 0x0112  # EXIF tag
_PHOTOMETRIC, _WHITE_IS_ZERO = 262, 0  # TIFF tag and value
_BITS = 258  # TIFF tag
_PNG_BEGIN, _PNG_DEPTH = 8, 24  # bytes before the first part of the file, and before the bits of a number


class ImageError(MediaError):
    """An image that cannot be used; the message says why, without naming the record."""


class ImageHeader(NamedTuple):
    """The header of an image.

    Attributes:
        height: in pixels, once the image is upright.
        width: in pixels, once the image is upright.
        animated: there are more pictures than the first, which is the one that is used.
    """

    height: int
    width: int
    animated: bool


def read_header(file: MediaFile) -> ImageHeader:
    """Size and kind of an image, without decoding it.

    Raises:
        ImageError: there is no such file, it is no image, or one that cannot be shown as a person sees it.
    """
    with _opened(file) as (image, stream):
        width, height = image.size
        on_its_side = _orientation(image, stream) >= 5
        animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
        return ImageHeader(width, height, animated) if on_its_side else ImageHeader(height, width, animated)


def decode(file: MediaFile) -> Image:
    """The image upright, of an animated one the first picture; at 8 bits, in any of Pillow's modes for these.

    Raises:
        ImageError: it cannot be decoded, or not be shown as a person sees it.
    """
    with _opened(file) as (image, stream):
        orientation = _orientation(image, stream)
        if image.format == "PNG":
            _refuse_damaged_png(stream)
        image.load()
        if image.mode == "I" or image.mode in _SIXTEEN_BITS:
            return _turned(_as_eight_bits(image), orientation)
        return _turned(image, orientation)


def flatten(image: Image, mode: str) -> Image:
    """The image in ``mode`` (``"RGB"`` or ``"L"``), laid on white where it is transparent."""
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        colours = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = _pillow().new("RGBA", colours.size, "white")
        image = _pillow().alpha_composite(white, colours)
    return image.convert(mode)


@contextmanager
def _opened(file: MediaFile) -> Iterator[tuple[Image, BinaryIO]]:
    """An image whose header was read and which can be used, and the file it is read from."""
    with opened(file, ImageError) as stream:
        pillow = _pillow()
        from PIL import UnidentifiedImageError

        try:
            image: Image = pillow.open(stream, formats=FORMATS)
        except UnidentifiedImageError:
            raise ImageError(f"it is no image that can be read; known are {', '.join(FORMATS)}") from None
        except pillow.DecompressionBombError as error:
            raise ImageError(f"it is too large ({error})") from error
        except Exception as error:  # Pillow's readers raise whatever they stumble over
            raise ImageError(f"it is no image that can be read; known are {', '.join(FORMATS)} ({error})") from error
        _refuse_too_large(image, pillow.MAX_IMAGE_PIXELS)
        _refuse_unknown_range(image)
        _settle_transparency(image, stream)
        try:
            yield image, stream
        except ImageError:
            raise
        except Exception as error:  # as above, whatever is asked of the image
            raise ImageError(f"it cannot be decoded ({type(error).__name__}: {error})") from error


def _refuse_too_large(image: Image, limit: int | None) -> None:
    pixels = image.width * image.height
    if limit is not None and pixels > limit:
        raise ImageError(
            f"it has {pixels} pixels, more than {limit}, and would take {pixels * 4 >> 20} MiB and more to decode; "
            "scale it down, or raise PIL.Image.MAX_IMAGE_PIXELS"
        )


def _refuse_unknown_range(image: Image) -> None:
    """Refuses an image whose numbers do not say what is black and what is white."""
    sixteen = image.mode in _SIXTEEN_BITS or (image.mode == "I" and image.format in _SCALED_TO_SIXTEEN_BITS)
    if not sixteen and image.mode not in _EIGHT_BITS:
        kinds = {"I": "whole numbers of 32 bits or with a sign", "F": "floating-point numbers"}
        raise ImageError(
            f"its pixels are {kinds.get(image.mode, f'of the kind {image.mode}')}, which do not say what is black and "
            "what is white; save it with 8 or 16 bits a pixel"
        )


def _settle_transparency(image: Image, stream: BinaryIO) -> None:
    """Brings the one transparent colour of a PNG to 8 bits as its pixels, with which Pillow compares it."""
    transparent = image.info.get("transparency")
    if image.format != "PNG" or not isinstance(transparent, int | tuple) or image.mode in ("P", *_SIXTEEN_BITS):
        return
    kept = stream.tell()
    stream.seek(_PNG_DEPTH)
    depth = stream.read(1)[0]
    stream.seek(kept)
    if depth == 16:
        raise ImageError("it has colours of 16 bits of which one is transparent; save it with an alpha channel")
    if isinstance(transparent, int):
        image.info["transparency"] = transparent * 255 // (2**depth - 1)


def _orientation(image: Image, stream: BinaryIO) -> int:
    """The orientation by EXIF: 1 is upright, 5 to 8 lie on their side."""
    if image.format == "TIFF":
        return 1  # Pillow turns these itself
    if image.format == "PNG" and "exif" not in image.info:
        for kind, start, length in _png_chunks(stream):  # it may stand behind the pixels
            if kind == b"eXIf":
                stream.seek(start)
                image.info["exif"] = b"Exif\0\0" + stream.read(length)
    # Not the image's own `getexif`: a PNG's would decode the whole image.
    found = _pillow().Image.getexif(image).get(_ORIENTATION, 1)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _turned(image: Image, orientation: int) -> Image:
    if orientation == 1:
        return image
    way = _pillow().Transpose
    info = image.info
    turned: Image = image.transpose(
        {
            2: way.FLIP_LEFT_RIGHT,
            3: way.ROTATE_180,
            4: way.FLIP_TOP_BOTTOM,
            5: way.TRANSPOSE,
            6: way.ROTATE_270,
            7: way.TRANSVERSE,
            8: way.ROTATE_90,
        }[orientation]
    )
    turned.info = info
    return turned


def _as_eight_bits(image: Image) -> Image:
    """A grey image of 16 bits in mode ``L``, white where a colour of it is transparent."""
    tags: Any = getattr(image, "tag_v2", {})
    most = 2 ** tags.get(_BITS, (16,))[0] - 1
    values: NDArray[np.int64] = np.asarray(image).astype(np.int64)
    grey = (values * 255 + most // 2) // most
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        grey = 255 - grey
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey[values == transparent] = 255
    result: Image = _pillow().fromarray(grey.clip(0, 255).astype(np.uint8))
    return result


def _png_chunks(stream: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and length in bytes of a PNG file's chunks, as far as they go; the stream is left where it was."""
    kept = stream.tell()
    try:
        position = _PNG_BEGIN
        while True:
            stream.seek(position)
            head = stream.read(8)
            if len(head) < 8:
                return
            length = int.from_bytes(head[:4], "big")
            yield head[4:], position + 8, length
            position += length + 12
    finally:
        stream.seek(kept)


def _refuse_damaged_png(stream: BinaryIO) -> None:
    """Pillow does not compare the checksums of pixels: what is damaged there would only look different."""
    ended = False
    for kind, start, length in _png_chunks(stream):
        stream.seek(start)
        content, checksum = stream.read(length), stream.read(4)
        if zlib.crc32(content, zlib.crc32(kind)) != int.from_bytes(checksum, "big") or len(checksum) < 4:
            raise ImageError("it is damaged: the checksum of a part of the PNG file is wrong")
        if kind == b"IEND":
            ended = True
            break
    if not ended:
        raise ImageError("it is damaged: the PNG file ends too early")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "Reading images needs Pillow; install it with: pip install 'flowtrain-lightning[data]'"
        ) from error
    return Image
