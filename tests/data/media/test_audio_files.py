"""Sound as files: what headers say without decoding, what is decoded, and by which words damaged clips are named."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile

from flowtrain_lightning.data.media.audio_files import decode_samples, read_audio_header
from flowtrain_lightning.data.media.audio_header import AudioError
from flowtrain_lightning.data.media.media_files import AudioFile, EncodedMedia

RATE, SAMPLES = 16_000, 48_000
LEFT = (0.3 * np.sin(np.arange(SAMPLES) * 2 * np.pi * 440 / RATE)).astype(np.float32)
STEREO = np.stack([LEFT, LEFT / 2], axis=1)
EXACT = {"wav": 1e-4, "flac": 1e-4, "ogg": 5e-2, "mp3": 5e-2}
"""How far decoded samples may be from those written: formats that leave something out are only near."""


def written(ending: str, samples: np.ndarray = STEREO) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format=ending.upper())
    return file.getvalue()


def clip(content: bytes) -> AudioFile:
    return AudioFile(EncodedMedia("clip", content))


@pytest.mark.parametrize("ending", EXACT)
def test_a_header_tells_samples_and_rate_and_the_channels_are_averaged(tmp_path: Path, ending: str):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(written(ending))
    assert read_audio_header(AudioFile(path)) == (SAMPLES, RATE)
    samples = decode_samples(AudioFile(path))
    assert samples.dtype == np.float32
    assert samples.shape == (SAMPLES,)
    assert np.abs(samples - LEFT * 0.75).mean() < EXACT[ending]


def test_a_header_is_read_without_what_follows_it():
    content = written("flac")
    assert read_audio_header(clip(content[:2000])) == (SAMPLES, RATE)


@pytest.mark.parametrize("ending", ["wav", "ogg"])
@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_cut_wave_or_ogg_is_refused_before_it_is_decoded(ending: str, kept: float):
    content = written(ending)
    with pytest.raises(AudioError, match="so it was cut"):
        read_audio_header(clip(content[: int(len(content) * kept)]))


@pytest.mark.parametrize(("ending", "words"), [("flac", "cannot be decoded"), ("mp3", "so it was cut")])
def test_a_cut_flac_or_mp3_is_refused_when_it_is_decoded(ending: str, words: str):
    content = written(ending)
    with pytest.raises(AudioError, match=words):
        decode_samples(clip(content[: len(content) // 2]))


NOT_FINITE = STEREO.copy()
NOT_FINITE[7] = np.nan


def not_finite() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, NOT_FINITE, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def of_another_format() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, STEREO, RATE, format="AIFF")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty: there is not one byte in it"),
        (written("wav", STEREO[:0]), "it is empty: there is not one sample in it"),
        (b"no sound " * 99, "no audio that can be read; known are FLAC, MP3, OGG, WAV$"),
        (of_another_format(), "it is of the format AIFF; known are"),
        (not_finite(), "no finite numbers"),
    ],
)
def test_what_is_no_clip_is_refused_by_its_reason(content: bytes, words: str):
    with pytest.raises(AudioError, match=words):
        decode_samples(clip(content))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(AudioError, match="there is no such file"):
        read_audio_header(AudioFile(tmp_path / "none.wav"))
