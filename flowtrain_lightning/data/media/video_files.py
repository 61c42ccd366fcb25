"""Videos as files: what their headers say, and some of their frames, decoded and turned upright."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.media.media_files import MediaError, VideoFile, opened
from flowtrain_lightning.data.media.video_ends import is_cut
from flowtrain_lightning.data.media.video_seeking import frames_after_seeking
from flowtrain_lightning.packing import IntArray

FORMATS = ("asf", "avi", "flv", "gif", "matroska", "mov", "mp4", "mpeg", "mpegts", "ogg", "webm")
"""Formats that are read. FFmpeg knows others, but some of these are lists that name other files and addresses."""


class VideoError(MediaError):
    """A video that cannot be used; the message says why, without naming the record."""


class VideoHeader(NamedTuple):
    """A video's header.

    Attributes:
        frames: how many there are.
        rate: frames a second, on average.
        height: in pixels, once the frames are upright.
        width: in pixels, once the frames are upright.
    """

    frames: int
    rate: float
    height: int
    width: int


def read_video_header(video: VideoFile) -> VideoHeader:
    """Length and size of a video, of which only the first frame is decoded.

    A format that does not say how many frames there are, such as Matroska, is read to its end for that.

    Raises:
        VideoError: there is no such file, it is no video, or one without frames.
    """
    with _opened(video) as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise VideoError("it has no frames that can be decoded")
        height, width = _upright(first, first.to_ndarray(format="rgb24")).shape[:2]
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        if not rate > 0:
            raise VideoError("it does not say how many frames it shows a second; write it anew with a frame rate")
        frames = int(stream.frames)
        if frames <= 0:
            container.seek(0)
            frames = sum(packet.size > 0 for packet in container.demux(stream))
        return VideoHeader(frames, rate, height, width)


def decode_frames(video: VideoFile, numbers: IntArray) -> Iterator[NDArray[np.uint8]]:
    """Some frames of a video, in order. What is before them is decoded only as far as they need it.

    Args:
        video: the video.
        numbers: ``[frames]`` which of them, from 0, ascending.

    Yields:
        ``[height, width, 3]`` red, green and blue.

    Raises:
        VideoError: it cannot be decoded, or ends before the last of these.
    """
    left = numbers
    if numbers[0] > 0:
        with _opened(video) as (container, stream):
            for frame in frames_after_seeking(container, stream, numbers):
                yield _upright(frame, frame.to_ndarray(format="rgb24"))
                left = left[1:]
    if len(left):
        yield from _decoded_from_the_beginning(video, left)


def _decoded_from_the_beginning(video: VideoFile, numbers: IntArray) -> Iterator[NDArray[np.uint8]]:
    wanted = set(numbers.tolist())
    last, decoded = int(numbers[-1]), 0
    with _opened(video) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            decoded += 1
            if number in wanted:
                yield _upright(frame, frame.to_ndarray(format="rgb24"))
            if number == last:
                return
    raise VideoError(f"its header says that frame {last + 1} is there, but only {decoded} can be decoded")


@contextmanager
def _opened(video: VideoFile) -> Iterator[tuple[Any, Any]]:
    """A video's container and the stream of its pictures."""
    av = pyav()
    # What a file names inside of it is not opened: it could be an address, or another file of this machine.
    options = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "none"}
    with opened(video.file, VideoError) as file:
        if is_cut(file):
            raise VideoError("it is damaged: the file ends before the end that it names, so it was cut")
        try:
            container = av.open(file, options=options)
        except (av.error.FFmpegError, ValueError) as error:
            raise VideoError(f"it is no video that can be read; known are {', '.join(FORMATS)}") from error
        with container:
            if not container.streams.video:
                raise VideoError("it has no pictures, only sound or text")
            try:
                yield container, container.streams.video[0]
            except av.error.FFmpegError as error:
                raise VideoError(f"it cannot be decoded ({error.strerror})") from error


def _upright(frame: Any, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The pixels of a frame as a person sees it: telephones write how they were held, and leave frames as they are."""
    quarters = round(int(frame.rotation) / 90) % 4  # counterclockwise
    return np.rot90(pixels, quarters) if quarters else pixels


def pyav() -> Any:
    """The library that reads videos.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ImportError(
            "Reading videos needs PyAV; install it with: pip install 'flowtrain-lightning[video]'"
        ) from error
    return av
