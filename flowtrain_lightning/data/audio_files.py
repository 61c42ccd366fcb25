"""Audio as files: what their headers say, and their samples, decoded and mixed down to one channel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.media_files import AudioFile, MediaError, opened
from flowtrain_lightning.data.video_ends import is_cut

FORMATS = ("FLAC", "MP3", "OGG", "WAV", "WAVEX")
"""Formats that are read. libsndfile knows others, but some of these take nearly any bytes for samples."""

_TELL_THEIR_END = ("OGG", "WAV", "WAVEX")
"""Of which a cut is seen without decoding."""


class AudioError(MediaError):
    """A clip of audio that cannot be used; the message says why, without naming the record."""


class AudioHeader(NamedTuple):
    """The header of a clip of audio.

    Attributes:
        samples: how many there are of each channel.
        rate: samples a second.
    """

    samples: int
    rate: int


def read_audio_header(audio: AudioFile) -> AudioHeader:
    """Length and rate of a clip, without decoding it.

    Raises:
        AudioError: there is no such file, it is no audio, it is empty, or it was cut.
    """
    with _opened(audio) as sound:
        return _header(sound)


def decode_samples(audio: AudioFile) -> NDArray[np.float32]:
    """``[samples]`` the whole clip between -1 and 1, at the rate of the file; several channels are averaged.

    Raises:
        AudioError: it cannot be decoded, or ends before the end that its header tells.
    """
    with _opened(audio) as sound:
        header = _header(sound)
        channels: NDArray[np.float32] = sound.read(header.samples, dtype="float32", always_2d=True)
    if len(channels) != header.samples:
        raise AudioError(
            f"it is damaged: its header says that it has {header.samples} samples, but only {len(channels)} can be "
            "decoded, so it was cut"
        )
    if not np.isfinite(channels).all():
        raise AudioError("some of its samples are no finite numbers; write it anew")
    return channels[:, 0] if channels.shape[1] == 1 else channels.mean(axis=1, dtype=np.float32)


def _header(sound: Any) -> AudioHeader:
    if sound.frames <= 0:
        raise AudioError("it is empty: there is not one sample in it")
    return AudioHeader(int(sound.frames), int(sound.samplerate))


@contextmanager
def _opened(audio: AudioFile) -> Iterator[Any]:
    """A clip of which the header was read."""
    soundfile = _soundfile()
    with opened(audio.file, AudioError) as file:
        cut = is_cut(file)
        try:
            sound = soundfile.SoundFile(file)
        except soundfile.SoundFileError as error:
            raise AudioError(f"it is no audio that can be read; known are {', '.join(FORMATS[:-1])}") from error
        with sound:
            if sound.format not in FORMATS:
                raise AudioError(f"it is of the format {sound.format}; known are {', '.join(FORMATS[:-1])}")
            if cut and sound.format in _TELL_THEIR_END:
                raise AudioError("it is damaged: the file ends before the end that it names, so it was cut")
            try:
                yield sound
            except soundfile.SoundFileError as error:
                raise AudioError(f"it cannot be decoded ({error})") from error


def _soundfile() -> Any:
    try:
        import soundfile
    except ImportError as error:
        raise ImportError(
            "Reading audio needs soundfile; install it with: pip install 'flowtrain-lightning[audio]'"
        ) from error
    return soundfile
