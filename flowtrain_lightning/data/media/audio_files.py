"""Audio as files, of videos too: what headers say, and samples, decoded and mixed down to one channel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.media.audio_header import AudioError, AudioHeader
from flowtrain_lightning.data.media.media_files import AudioFile, opened
from flowtrain_lightning.data.media.video_ends import is_cut
from flowtrain_lightning.data.media.video_sound import decode_sound, is_video_file, sound_header

FORMATS = ("FLAC", "MP3", "OGG", "WAV", "WAVEX")
"""Formats that are read. libsndfile knows others, but some of these take nearly any bytes for samples."""

_TELL_THEIR_END = ("OGG", "WAV", "WAVEX")
"""Of which a cut is seen without decoding."""


def read_audio_header(audio: AudioFile) -> AudioHeader:
    """Length and rate of a clip, without decoding it.

    Raises:
        AudioError: there is no such file, it is no audio, it is empty, or it was cut.
    """
    with opened(audio.file, AudioError) as file:
        cut = is_cut(file)
        if is_video_file(file):
            _refuse_cut(cut)
            return sound_header(file)
        with _opened(file, cut) as sound:
            return _header(sound)


def decode_samples(audio: AudioFile) -> NDArray[np.float32]:
    """``[samples]`` the whole clip between -1 and 1, at the rate of the file; several channels are averaged.

    Raises:
        AudioError: it cannot be decoded, or ends before the end that its header tells.
    """
    with opened(audio.file, AudioError) as file:
        cut = is_cut(file)
        if is_video_file(file):
            _refuse_cut(cut)
            return decode_sound(file)
        with _opened(file, cut) as sound:
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


def _refuse_cut(cut: bool) -> None:
    if cut:
        raise AudioError("it is damaged: the file ends before the end that it names, so it was cut")


@contextmanager
def _opened(file: BinaryIO, cut: bool) -> Iterator[Any]:
    """A clip of which the header was read."""
    soundfile = _soundfile()
    try:
        sound = soundfile.SoundFile(file)
    except soundfile.SoundFileError as error:
        raise AudioError(f"it is no audio that can be read; known are {', '.join(FORMATS[:-1])}") from error
    with sound:
        if sound.format not in FORMATS:
            raise AudioError(f"it is of the format {sound.format}; known are {', '.join(FORMATS[:-1])}")
        _refuse_cut(cut and sound.format in _TELL_THEIR_END)
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
