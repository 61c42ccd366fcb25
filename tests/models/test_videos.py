"""Frames, sizes and words of videos are those of the video processors and processors of Hugging Face."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("av")

from transformers.video_utils import VideoMetadata  # noqa: E402

from flowtrain_lightning.data import DataError, VideoProcessor  # noqa: E402
from flowtrain_lightning.data.media.video_files import VideoHeader, read_video_header  # noqa: E402
from flowtrain_lightning.data.records.formats import parse  # noqa: E402
from flowtrain_lightning.models import Qwen3Videos, template_of, videos_of  # noqa: E402
from tests.models.clips import VIDEO_FAMILIES, tokenizer_of, video_data, videos_for, write_video_records  # noqa: E402
from tests.models.processors import PUBLISHED  # noqa: E402
from tests.tiny_videos import write_clip  # noqa: E402

OF_TRANSFORMERS = [
    ("Qwen2", 30, 10.0, 48, 64, 6, 75, 1680),
    ("Qwen2", 7, 3.0, 120, 80, 4, 9, 1120),
    ("Qwen2", 5, 1.0, 640, 480, 4, 6, 3128),
    ("Qwen2", 2000, 29.97, 1080, 1920, 132, 130936, 190080),
    ("Qwen2", 90, 24.0, 20, 300, 6, 225, 1584),
    ("Qwen3", 30, 10.0, 48, 64, 6, 87, 288),
    ("Qwen3", 7, 3.0, 120, 80, 4, 12, 280),
    ("Qwen3", 5, 1.0, 640, 480, 5, 10, 1680),
    ("Qwen3", 2000, 29.97, 1080, 1920, 133, 132934, 804),
    ("Qwen3", 90, 24.0, 20, 300, 7, 311, 544),
]
"""What the classes of transformers 5.23 answer, which need torchvision: frames, rate, height, width of a video, how
many frames are taken and the sum of their numbers, and patches, by the settings that the classes have; Qwen2-VL's with
two frames a second."""


@pytest.mark.parametrize(("family", "frames", "rate", "height", "width", "taken", "total", "patches"), OF_TRANSFORMERS)
def test_frames_and_patches_are_those_of_the_video_processors(
    family, frames, rate, height, width, taken, total, patches
):
    videos = VideoProcessor() if family == "Qwen2" else Qwen3Videos()
    found = videos.sample(VideoHeader(frames, rate, height, width))
    assert (len(found.frames), found.frames.sum(), found.patches) == (taken, total, patches)


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_a_video_is_written_as_the_processor_writes_it(family, tmp_path):
    write_clip(tmp_path / "a.mkv", 9, 12, 16, 3)
    theirs = PUBLISHED[family].save(tmp_path / "model")
    tokenizer, videos = tokenizer_of(family), videos_for(family)
    turns = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "A cat."}]
    record = parse({"messages": turns, "videos": ["a.mkv"]}, "/d.jsonl", 0, tmp_path.joinpath)
    sampled = videos.sample(read_video_header(record.videos[0]))
    rows = np.array([videos.rows_of_features(sampled)])
    theirs.video_processor = _Settings(videos)
    metadata = VideoMetadata(total_num_frames=9, fps=3.0, frames_indices=sampled.frames.tolist())
    grid = np.array([[sampled.clip.moments, *sampled.grid]])
    words = theirs.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
    content = [{"type": "video"}, {"type": "text", "text": "What?"}]
    text = theirs.apply_chat_template(
        [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}],
        tokenize=False,
    ).replace("<|video_pad|>", words)
    data = video_data(tmp_path, family, train=tmp_path / "none.jsonl")
    found = template_of(tmp_path / "model").sequence(record, data.tokenizer, rows, videos=videos)
    assert found.tokens.tolist() == tokenizer(text)["input_ids"]
    assert len(found.media_positions) == rows.sum()


class _Settings:
    """What a processor asks of its video processor to write a video."""

    def __init__(self, videos: Any) -> None:
        self.merge_size, self.temporal_patch_size = videos.merge_size, videos.temporal_patch_size


def test_the_rule_is_read_from_the_models_files(tmp_path):
    for family in ("qwen2_5_vl", "qwen3_vl", "llava"):
        PUBLISHED[family].save(tmp_path / family)
    qwen3 = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "fps": 1, "cap_pixels_per_frame": True}
    (tmp_path / "qwen3_vl" / "video_preprocessor_config.json").write_text(json.dumps(qwen3))
    found = videos_of(tmp_path / "qwen2_5_vl")
    assert type(found) is VideoProcessor
    assert (found.patch_size, found.min_pixels, found.max_pixels) == (14, 4 * 14**2, 64 * 14**2)
    assert videos_of(tmp_path / "qwen3_vl") == Qwen3Videos(
        fps=1, min_pixels=4096, max_pixels=25165824, frame_pixels=768 * 32**2
    )
    assert videos_of(tmp_path / "llava") is None
    PUBLISHED["qwen2_vl"].config().save_pretrained(tmp_path / "weights alone")
    assert videos_of(tmp_path / "weights alone") is None
    (tmp_path / "qwen3_vl" / "video_preprocessor_config.json").write_text(json.dumps({**qwen3, "resample": 2}))
    with pytest.raises(ValueError, match="has resample=2, which cannot be followed"):
        videos_of(tmp_path / "qwen3_vl")


def test_a_video_where_nothing_says_what_becomes_of_videos_is_refused(tmp_path):
    write_video_records(tmp_path, 1)
    data = video_data(tmp_path, "qwen2_vl", videos=None)
    with pytest.raises(DataError, match=r"record 1: it has a video, but nothing says what becomes of videos"):
        data.setup("fit")
