"""The sound of a video: its length by the header, its samples, and both as two media of one sample."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest

from flowtrain_lightning.data import AudioProcessor, FlowDataModule, VideoProcessor
from flowtrain_lightning.data.media.audio_files import decode_samples, read_audio_header
from flowtrain_lightning.data.media.audio_header import AudioError
from flowtrain_lightning.data.media.media_files import AudioFile
from tests.data.support import IMAGES, TEMPLATE, Letters

RATE, SECONDS = 16_000, 1.0
TONE = (0.4 * np.sin(np.arange(int(RATE * SECONDS)) * 2 * np.pi * 500 / RATE)).astype(np.float32)
KINDS = {"a.mp4": ("mpeg4", "aac"), "a.mkv": ("mpeg4", "pcm_s16le"), "a.avi": ("mpeg4", "pcm_s16le")}


def write_video(path: Path, pictures: str, sound: str | None, samples: np.ndarray = TONE) -> Path:
    """A video of one second of noise, with sound on two channels of which the second is silent."""
    draw = np.random.default_rng(0)
    with av.open(path, "w") as container:
        seen = container.add_stream(pictures, rate=8)
        seen.width, seen.height, seen.pix_fmt = 16, 16, "yuv420p"
        heard = None if sound is None else container.add_stream(sound, rate=RATE, layout="stereo")
        for _ in range(8):
            frame = av.VideoFrame.from_ndarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8), format="rgb24")
            container.mux(seen.encode(frame))
        container.mux(seen.encode())
        if heard is not None:
            both = np.stack([samples, np.zeros_like(samples)])
            frame = av.AudioFrame.from_ndarray(both, format="fltp", layout="stereo")
            frame.sample_rate = RATE
            container.mux(heard.encode(frame))
            container.mux(heard.encode())
    return path


@pytest.mark.parametrize("name", KINDS)
def test_the_sound_of_a_video_is_read_as_a_clip(tmp_path: Path, name: str):
    clip = AudioFile(write_video(tmp_path / name, *KINDS[name]))
    header = read_audio_header(clip)
    assert header.rate == RATE
    assert header.samples == pytest.approx(RATE * SECONDS, rel=0.1)
    samples = decode_samples(clip)
    assert len(samples) == header.samples
    middle = samples[RATE // 4 : 3 * RATE // 4]
    assert np.abs(np.fft.rfft(middle)).argmax() * RATE / len(middle) == pytest.approx(500, abs=4)
    assert np.abs(middle).max() == pytest.approx(0.2, abs=0.03)  # the mean of both channels


def test_a_video_without_sound_is_refused(tmp_path: Path):
    with pytest.raises(AudioError, match="it is a video without sound"):
        read_audio_header(AudioFile(write_video(tmp_path / "a.mp4", "mpeg4", None)))


def test_a_cut_video_has_no_sound(tmp_path: Path):
    path = write_video(tmp_path / "a.mp4", *KINDS["a.mp4"])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(AudioError, match="so it was cut"):
        read_audio_header(AudioFile(path))


def test_a_video_and_its_sound_are_two_media_of_one_sample(tmp_path: Path):
    write_video(tmp_path / "a.mp4", *KINDS["a.mp4"])
    parts = [{"type": "video", "path": "a.mp4"}, {"type": "audio", "path": "a.mp4"}, {"type": "text", "text": "q"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": turns}))
    audio = AudioProcessor(sample_rate=8000, frame_samples=400, frames_per_row=4, max_seconds=2.0)
    template = replace(TEMPLATE, video_token="<I>", audio_token="<S>")
    videos = VideoProcessor(patch_size=4, merge_size=2, min_pixels=64, max_pixels=256)
    data = FlowDataModule(
        tmp_path / "d.jsonl",
        token_budget=200,
        global_batch_size=1,
        tokenizer=Letters(),
        template=template,
        images=IMAGES,
        videos=videos,
        audio=audio,
    )
    data.setup("fit")
    step = next(iter(data.train_dataloader()))
    seen = {media.modality: media for batches in step.media.values() for media in batches}
    assert set(seen) == {"image", "audio"}
    (clip,) = seen["image"].clips
    assert clip.moments > 1
    (batch,) = step.microbatches
    assert {name: len(rows) for name, rows in batch.media_positions.items()} == {
        "image": sum(seen["image"].rows),
        "audio": sum(seen["audio"].rows),
    }
    assert sum(seen["audio"].rows) == pytest.approx(8000 / 1600, abs=1)
