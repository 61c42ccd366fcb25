"""Some frames of a video without decoding all before them: from the last picture that needs no other one.

Frames are told apart by their times, which are read from the packets without decoding them: a frame's number is the
place of its time among all. Where that could be wrong, nothing is given, and a video is decoded from its beginning:
packets without times or with equal ones, codecs in which a packet need not be a frame, files that leave some of theirs
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flowtrain_lightning.packing import IntArray

_WHOLE = ("ffv1", "mjpeg", "mpeg4", "png", "prores")
"""Codecs of which every packet is a frame, and one that is called a key frame needs no other."""

_INSTANT = {"h264": (0, 0x1F, (5,)), "hevc": (1, 0x3F, (19, 20, 21))}
"""Codec -> how far to shift the first byte of a unit, and its mask, for its type; the types of pictures after which
none looks back behind them, whatever a file calls a key frame (ITU-T H.264, table 7-1; H.265, table 7-1)."""

_LENGTHS_AT = {"h264": 4, "hevc": 21}
"""Codec -> the byte of a file's settings that says how long the lengths of units are."""


def frames_after_seeking(container: Any, stream: Any, numbers: IntArray) -> Iterator[Any]:
    """Frames of a video as PyAV decodes them, equal to those of the whole; fewer, or none, where that is not certain.

    Args:
        container: of PyAV.
        stream: its pictures.
        numbers: ``[frames]`` which of them, from 0, ascending.
    """
    import av

    try:
        times, starts = _times(container, stream)
        if not starts or len(times) <= numbers[-1]:
            return
        start = max((each for each in starts if each <= times[numbers[0]]), default=times[0])
        if start == times[0]:  # nothing to be left out
            return
        yield from _decoded_from(container, stream, start, times, numbers)
    except av.error.FFmpegError:
        return


def _decoded_from(container: Any, stream: Any, start: int, times: list[int], numbers: IntArray) -> Iterator[Any]:
    container.seek(start, stream=stream)
    number_of, wanted = {each: number for number, each in enumerate(times)}, set(numbers.tolist())
    expected, is_first = number_of[start], True
    for packet in container.demux(stream):
        if is_first and packet.pts != start:
            return
        is_first = False
        for frame in packet.decode():
            if frame.pts is not None and frame.pts < start:
                continue  # it is shown before, and needs what was not decoded
            if number_of.get(frame.pts) != expected:
                return
            if expected in wanted:
                yield frame
            if expected == numbers[-1]:
                return
            expected += 1


def _times(container: Any, stream: Any) -> tuple[list[int], list[int]]:
    """The times of all frames in order, and of those with which decoding may begin; none where they are not certain."""
    codec, times, starts = stream.codec_context.name, [], []
    if codec not in _WHOLE and codec not in _INSTANT:
        return [], []
    settings = bytes(stream.codec_context.extradata or b"")
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if packet.pts is None or packet.is_discard or packet.is_corrupt:
            return [], []
        times.append(int(packet.pts))
        if packet.is_keyframe and (codec in _WHOLE or _is_instant(bytes(packet), codec, settings)):
            starts.append(int(packet.pts))
    if not times or times[0] != min(times) or len(set(times)) < len(times) or starts[:1] != times[:1]:
        return [], []
    return sorted(times), starts


def _is_instant(packet: bytes, codec: str, settings: bytes) -> bool:
    """Whether a picture is one after which none looks back behind it."""
    shift, mask, kinds = _INSTANT[codec]
    if not settings or settings[0] != 1 or len(settings) <= _LENGTHS_AT[codec]:
        return False  # units are not told by their lengths
    size = (settings[_LENGTHS_AT[codec]] & 3) + 1
    place = 0
    while place + size < len(packet):
        if (packet[place + size] >> shift) & mask in kinds:
            return True
        place += size + int.from_bytes(packet[place : place + size], "big")
    return False
