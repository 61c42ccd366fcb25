"""Whether a file of video or audio reaches as far as it says: readers take the end of one that was cut for its end."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import BinaryIO

_MATROSKA, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_ASF_HEADER = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
_ASF_DATA = bytes.fromhex("3626b2758e66cf11a6d900aa0062ce6c")
_BOXES = (b"ftyp", b"moov", b"mdat", b"moof", b"free", b"skip", b"wide", b"pnot", b"styp", b"sidx", b"uuid", b"mfra")
"""Kinds of boxes that stand outermost in a file of MP4 or QuickTime."""
_PACK, _PROGRAM_END = b"\x00\x00\x01\xba", b"\x00\x00\x01\xb9"
_MPEG_SYNC = 0x47
_TRANSPORT = ((188, 0), (192, 4), (204, 0))
"""Bytes of a packet of MPEG's transport streams, and at which of them it has its mark."""


def is_cut(file: BinaryIO) -> bool:
    """Whether a file ends before the place that it names, within one of its parts, or without the mark of its end.

    Of Matroska, WebM, MP4, QuickTime, AVI, WAV, ASF, GIF, FLV and Ogg that tells nearly every cut. MPEG's streams have
    no end: there a cut between two packets is not seen. Of what was written as it was sent, without a length, and where
    something unknown follows, nothing is said.

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
    elif start.startswith(b"FLV"):
        said = _end_of_flv
    elif start.startswith(b"OggS"):
        said = _end_of_ogg
    elif start.startswith(_PACK):
        said = _end_of_packs
    elif _MPEG_SYNC in start[:5]:
        said = _end_of_transport
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
    """The mark of the end; some writers add zeros or a line's end behind it."""
    flags = _read(file, 0, 11)[10:]
    place = 13 + _colours(flags)
    while place < end:
        head = _read(file, place, 11)
        if head.startswith(b";"):
            return place + 1
        if head.startswith(b","):  # an image, with its place and size, and the width of its codes
            place += 10 + _colours(head[9:10]) + 1
        elif head.startswith(b"!"):
            place += 2
        else:
            return 0
        while (size := _read(file, place, 1)) not in (b"\0", b""):
            place += 1 + size[0]
        place += 1
    return end + 1


def _colours(flags: bytes) -> int:
    """Bytes of a table of colours that may follow."""
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0


def _end_of_flv(file: BinaryIO, end: int) -> int:
    """The end of the last tag; behind the end where the file says that it is longer, and its time is not over either.

    A recorder may copy what a server said of its own file, which is as long in time but not in bytes.
    """
    place = int.from_bytes(_read(file, 5, 4), "big") + 4
    times: list[int] = []
    described = b""
    while place + 11 <= end:
        head = _read(file, place, 11)
        kind, size = head[0] & 0x1F, int.from_bytes(head[1:4], "big")
        if kind not in (8, 9, 18):
            return 0
        if kind == 18 and not described:
            described = file.read(size)
        time = int.from_bytes(head[7:8] + head[4:7], "big")
        if kind == 9 and time not in times[-1:]:
            times = [*times[-1:], time]
        place += 11 + size + 4  # the size of a tag stands behind it, too
    if place - 4 > end:
        return place
    if place < end:
        return end + (_read(file, place, 1)[0] & 0x1F in (8, 9, 18))
    nbytes, seconds = _number_in_flv(described, b"filesize"), _number_in_flv(described, b"duration")
    shown = (2.5 * times[-1] - 1.5 * times[0]) / 1000 if len(times) == 2 else 0.0
    return end + 1 if nbytes > end and (not seconds or shown < seconds) else 0


def _number_in_flv(described: bytes, name: bytes) -> float:
    """A number that the file says of itself; 0 where it does not."""
    found = described.partition(len(name).to_bytes(2, "big") + name + b"\0")[2][:8]
    return float(struct.unpack(">d", found)[0]) if len(found) == 8 else 0.0


def _end_of_ogg(file: BinaryIO, end: int) -> int:
    """The end of the last page; behind the end where a stream goes on, and the last page is not the end of another."""
    place, ends = 0, False
    running: set[bytes] = set()
    while place < end:
        head = _read(file, place, 27)
        if not head.startswith(b"OggS") and not b"OggS".startswith(head):
            return 0
        sizes = file.read(head[26]) if len(head) == 27 else b""
        if len(head) < 27 or len(sizes) < head[26]:
            return end + 1
        ends = bool(head[5] & 4)
        (running.discard if ends else running.add)(head[14:18])
        place += 27 + len(sizes) + sum(sizes)
    return end + 1 if place == end and running and not ends else place


def _end_of_packs(file: BinaryIO, end: int) -> int:
    """The end of the last packet of a program stream."""
    place = 0
    while place + 3 <= end:
        head = _read(file, place, 14)
        if not head.startswith(_PACK[:3]) or (head[3:4] and head[3] < _PROGRAM_END[3]):
            return 0  # padding, or something else behind the video
        if head.startswith(_PROGRAM_END):
            place += 4
        elif not head.startswith(_PACK):
            place += 6 + int.from_bytes(head[4:6], "big")
        elif head[4:5] and head[4] >> 6 == 1:
            place += 14 + (head[13] & 7 if len(head) == 14 else 0)
        else:
            place += 12
    return place


def _end_of_transport(file: BinaryIO, end: int) -> int:
    """The end of the last packet, where it has begun."""
    for size, mark in _TRANSPORT:
        last = end - end % size
        marked = [mark + size * number for number in range(5)] + [last - size + mark, last + mark]
        if 5 * size <= last < end and all(_read(file, place, 1) == bytes([_MPEG_SYNC]) for place in marked):
            return last + size
    return 0
