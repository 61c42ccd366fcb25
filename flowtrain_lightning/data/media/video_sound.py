"""The sound of video files, which a record may name beside their pictures as a clip of audio of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.media.audio_header import AudioError, AudioHeader
from flowtrain_lightning.data.media.video_files import FORMATS, pyav

_MATROSKA, _FLV = b"\x1a\x45\xdf\xa3", b"FLV\x01"
_SLACK_S = 0.25
"""By so much the sound may end before or behind the end that the header tells: encoders fill their last block."""


def is_video_file(file: BinaryIO) -> bool:
    """Whether a file begins as one of the formats of videos that have sound.

    Args:
        file: the file, left at its beginning.
    """
    start = file.read(12)
    file.seek(0)
    return start[4:8] == b"ftyp" or start.startswith((_MATROSKA, _FLV)) or start[8:] == b"AVI "


def sound_header(file: BinaryIO) -> AudioHeader:
    """Length and rate of a video's sound, by its header.

    Raises:
        AudioError: it has no sound, or does not say how long that is.
    """
    with _opened(file) as (container, stream):
        return _header(container, stream)


def decode_sound(file: BinaryIO) -> NDArray[np.float32]:
    """``[samples]`` as long as the header says; several channels are averaged.

    Raises:
        AudioError: it cannot be decoded, or is much shorter or longer than its header says.
    """
    with _opened(file) as (container, stream):
        header = _header(container, stream)
        to_floats = pyav().AudioResampler(format="fltp")
        frames = [each for frame in container.decode(stream) for each in to_floats.resample(frame)]
        blocks = [frame.to_ndarray().mean(axis=0, dtype=np.float32) for frame in frames]
    samples = np.concatenate([np.empty(0, np.float32), *blocks])
    if abs(len(samples) - header.samples) > _SLACK_S * header.rate:
        raise AudioError(
            f"it is damaged: its header says that its sound has {header.samples} samples, but {len(samples)} can be "
            "decoded"
        )
    return np.pad(samples[: header.samples], (0, max(0, header.samples - len(samples))))


def _header(container: Any, stream: Any) -> AudioHeader:
    seconds = float(stream.duration * stream.time_base) if stream.duration else (container.duration or 0) / 1e6
    samples = round(seconds * stream.rate)
    if samples <= 0:
        raise AudioError("its header does not say how long its sound is; write the file anew")
    return AudioHeader(samples, int(stream.rate))


@contextmanager
def _opened(file: BinaryIO) -> Iterator[tuple[Any, Any]]:
    """A video's container and its first stream of sound."""
    av = pyav()
    options = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "none"}
    try:
        container = av.open(file, options=options)
    except (av.error.FFmpegError, ValueError) as error:
        raise AudioError(f"it is no video that can be read; known are {', '.join(FORMATS)}") from error
    with container:
        if not container.streams.audio:
            raise AudioError("it is a video without sound")
        try:
            yield container, container.streams.audio[0]
        except av.error.FFmpegError as error:
            raise AudioError(f"it cannot be decoded ({error.strerror})") from error
