"""Whether a video file reaches as far as it says: FFmpeg takes the end of one that was cut for the end of the video."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

_MATROSKA, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_ASF_HEADER = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
_ASF_DATA = bytes.fromhex("3626b2758e66cf11a6d900aa0062ce6c")
_BOXES = (b"ftyp", b"moov", b"mdat", b"moof", b"free", b"skip", b"wide", b"pnot", b"styp", b"sidx", b"uuid", b"mfra")
"""Kinds of boxes that stand outermost in a file of MP4 or QuickTime."""


def is_cut(file: BinaryIO) -> bool:
    """Whether a file of Matroska, WebM, MP4, QuickTime, AVI, ASF or GIF ends before the place that it names.

    Of other formats, and of those that were written as they were sent, without a length, nothing is said.

    Args:
        file: the file, left at its beginning.
    """
    end = file.seek(0, 2)
    start = _read(file, 0, 16)
    said: Callable[[BinaryIO, int], int] | None = None
    if start.startswith(_MATROSKA):
        said = _end_of_matroska
    elif start[4:8] in _BOXES:
        said = _end_of_boxes
    elif start.startswith(b"RIFF"):
        said = _end_of_riff
    elif start == _ASF_HEADER:
        said = _end_of_asf
    elif start.startswith(b"GIF8"):
        said = _end_of_gif
    found = 0 if said is None else said(file, end)
    file.seek(0)
    return found > end


def _read(file: BinaryIO, place: int, count: int) -> bytes:
    file.seek(place)
    return file.read(count)


def _end_of_matroska(file: BinaryIO, end: int) -> int:
    """The end of the segment, which is the file but for a short header."""
    del end
    header, length = _length(file, len(_MATROSKA))
    place = len(_MATROSKA) + length + (header or 0)
    if header is None or _read(file, place, len(_SEGMENT)) != _SEGMENT:
        return 0
    size, length = _length(file, place + len(_SEGMENT))
    return 0 if size is None else place + len(_SEGMENT) + length + size


def _length(file: BinaryIO, place: int) -> tuple[int | None, int]:
    """A size of Matroska's there (None: not known when it was written), and how many bytes it takes."""
    found = _read(file, place, 8)
    count = 9 - found[0].bit_length() if found and found[0] else 8
    bits = (1 << 7 * count) - 1
    size = int.from_bytes(found[:count], "big") & bits
    return (None if size == bits or len(found) < count else size), count


def _end_of_boxes(file: BinaryIO, end: int) -> int:
    place = 0
    while place + 8 <= end:
        head = _read(file, place, 16)
        size = int.from_bytes(head[:4], "big")
        size = int.from_bytes(head[8:16], "big") if size == 1 else size
        if head[4:8] not in _BOXES or size < 8:  # to the end of the file, or something else behind the video
            return 0
        place += size
    return place


def _end_of_riff(file: BinaryIO, end: int) -> int:
    """The end of the last list; that of a large file follows others."""
    place = 0
    while place + 8 <= end and (head := _read(file, place, 8)).startswith(b"RIFF"):
        size = int.from_bytes(head[4:], "little")
        if size in (0, 0xFFFFFFFF):
            return 0
        place += 8 + size
        if place < end:
            place += size % 2
    return place


def _end_of_asf(file: BinaryIO, end: int) -> int:
    """The end of the frames, behind which only an index may stand."""
    del end
    place = int.from_bytes(_read(file, 16, 8), "little")
    data = _read(file, place, 24)
    return place + int.from_bytes(data[16:], "little") if data[:16] == _ASF_DATA else 0


def _end_of_gif(file: BinaryIO, end: int) -> int:
    """Behind the end where the mark of it is missing; some writers add zeros or a line's end."""
    last = _read(file, max(end - 64, 0), 64).rstrip(b"\0\r\n")
    return 0 if last.endswith(b";") else end + 1
