"""Sound as frames: one rate, frames of samples or log-mel frames, rows of features, clips that are too long."""

from __future__ import annotations

import dataclasses
import io
from math import ceil

import numpy as np
import pytest
import soundfile

from flowtrain_lightning.data import AudioProcessor, LogMelProcessor
from flowtrain_lightning.data.media.audio_header import AudioError, AudioHeader
from flowtrain_lightning.data.media.media_files import AudioFile, EncodedMedia

SMALL = AudioProcessor(sample_rate=8000, frame_samples=10, frames_per_row=4, max_seconds=1.0)


def sound(samples: np.ndarray, rate: int) -> AudioFile:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return AudioFile(EncodedMedia("clip", file.getvalue()))


def wave(count: int, rate: int, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(np.arange(count) * 2 * np.pi * hertz / rate)).astype(np.float32)


@pytest.mark.parametrize("rate", [8000, 16_000, 11_025, 44_100, 4000])
@pytest.mark.parametrize("count", [1, 40, 41, 999])
def test_a_header_alone_tells_how_many_frames_and_rows_a_clip_has(rate: int, count: int):
    samples = SMALL.samples(AudioHeader(count, rate))
    assert samples == ceil(count * 8000 / rate)
    loaded = SMALL.load(sound(wave(count, rate), rate))
    assert loaded.pixels.shape == (SMALL.frames(samples), 10)
    assert loaded.grid == (1, SMALL.frames(samples))
    assert loaded.rows == SMALL.rows_of_features(samples) == ceil(samples / 40)
    assert (loaded.modality, loaded.size, loaded.clip) == ("audio", (count, rate), None)


def test_frames_are_the_samples_one_after_another_and_silence_fills_the_last_row():
    given = wave(50, 8000)
    loaded = SMALL.load(sound(given, 8000))
    np.testing.assert_array_equal(loaded.pixels.flatten(), np.pad(given, (0, 30)))


def test_a_tone_keeps_its_pitch_at_another_rate():
    values = SMALL.load(sound(wave(22_050, 44_100, 1000.0), 44_100)).pixels.flatten()
    assert np.abs(np.fft.rfft(values)).argmax() * 8000 / len(values) == pytest.approx(1000.0, rel=0.01)


def test_a_clip_that_is_too_long_is_refused_by_its_header():
    with pytest.raises(AudioError, match=r"lasts 1\.1 s, longer than max_seconds=1 of AudioProcessor"):
        SMALL.samples(AudioHeader(8800, 8000))


@pytest.mark.parametrize(
    "change", [{"sample_rate": 0}, {"frame_samples": 0}, {"max_seconds": 0}, {"frames_per_row": -1}]
)
def test_impossible_settings_are_refused(change: dict):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize(("bins", "count"), [(80, 16_000), (128, 12_345)])
def test_log_mel_frames_are_those_of_whisper(bins: int, count: int):
    whisper = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=bins)
    processor = LogMelProcessor(mel_bins=bins)
    draw = np.random.default_rng(bins).normal(0, 0.1, count).astype(np.float32)
    found = processor.values(draw)
    expected = whisper(processor.filled(draw), sampling_rate=16_000, padding=False, return_tensors="np").input_features
    assert found.shape == (processor.frames(count), bins)
    np.testing.assert_allclose(found, expected[0].T, atol=2e-5)


def test_a_window_that_is_longer_than_the_shortest_clip_is_refused():
    with pytest.raises(ValueError, match="window=4000"):
        LogMelProcessor(window=4000)


def test_every_setting_changes_the_fingerprint():
    changed = {"sample_rate": 9, "frame_samples": 9, "frames_per_row": 9, "max_seconds": 9.0}
    found = {dataclasses.replace(SMALL, **{name: value}).fingerprint for name, value in changed.items()}
    assert len(found | {SMALL.fingerprint}) == len(changed) + 1
