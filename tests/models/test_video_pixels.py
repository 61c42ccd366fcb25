"""Frames, pixels, seconds and positions of videos are those of Hugging Face's processors and models, to the bit."""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("av")

from transformers.video_utils import VideoMetadata  # noqa: E402

from flowtrain_lightning.data.loading.collate import pack_media  # noqa: E402
from flowtrain_lightning.data.media.media_files import VideoFile  # noqa: E402
from flowtrain_lightning.models import videos_of  # noqa: E402
from tests.models.clips import VIDEO_FAMILIES, video_family  # noqa: E402
from tests.models.processors import PUBLISHED  # noqa: E402
from tests.models.test_videos_in_families import Samples, as_hugging_face_takes_it  # noqa: E402
from tests.tiny_videos import write_clip  # noqa: E402

Settings = dict[str, Any]

USUAL: Settings = {"fps": 2}
SMALL: Settings = {**USUAL, "size": {"shortest_edge": 4 * 32**2, "longest_edge": 60 * 32**2}}
CAPPED: Settings = {**SMALL, "cap_pixels_per_frame": True, "max_video_tokens": 24}


class Case(NamedTuple):
    """A video and what Hugging Face's video processor makes of it.

    Attributes:
        family: whose processor it is.
        clip: frames, height, width and frames a second of the video.
        settings: of the processor.
        grid: moments, and height and width in patches.
        pixels: the beginning of the SHA-256 of all pixels, float32.
    """

    family: str
    clip: tuple[int, int, int, int]
    settings: Settings
    grid: tuple[int, int, int]
    pixels: str


OF_TRANSFORMERS = [
    Case("qwen2_vl", (9, 12, 16, 3), USUAL, (3, 20, 28), "346da75a5bfe26cf"),
    Case("qwen2_vl", (33, 60, 90, 24), SMALL, (2, 4, 6), "507b20342ab4a9e4"),
    Case("qwen2_vl", (3, 40, 400, 7), CAPPED, (1, 2, 28), "a18e868a2cb19b67"),
    Case("qwen2_vl", (61, 100, 100, 29), USUAL, (2, 24, 24), "81bd495808ec5b1e"),
    Case("qwen2_vl", (13, 300, 200, 2), SMALL, (6, 22, 14), "e26d80a07eb763a0"),
    Case("qwen2_vl", (5, 160, 120, 1), CAPPED, (2, 6, 4), "633f39aacecdd8e7"),
    Case("qwen3_vl", (9, 12, 16, 3), USUAL, (3, 10, 12), "7c948d5f6521f0b5"),
    Case("qwen3_vl", (33, 60, 90, 24), SMALL, (2, 4, 6), "0ca65bc42608ddb8"),
    Case("qwen3_vl", (3, 40, 400, 7), CAPPED, (2, 2, 24), "9140d8d4524cd8aa"),
    Case("qwen3_vl", (61, 100, 100, 29), USUAL, (2, 12, 12), "35caecfd14370052"),
    Case("qwen3_vl", (13, 300, 200, 2), SMALL, (7, 4, 2), "9cc1a9be7899ac34"),
    Case("qwen3_vl", (5, 160, 120, 1), CAPPED, (3, 8, 6), "de6590c6647cbb73"),
]
"""What the classes of transformers 5.23 answer, whose pixels are scaled by PyTorch; they need torchvision."""


class Seen(NamedTuple):
    """What is made of a video, in the processor's order of pixels."""

    grid: tuple[int, ...]
    pixels: str
    seconds: float


def seen(grid: Any, pixels: torch.Tensor, seconds: float) -> Seen:
    return Seen(tuple(grid), hashlib.sha256(pixels.numpy().tobytes()).hexdigest()[:16], seconds)


def by_ours(case: Case, folder: Path) -> Seen:
    write_clip(folder / "a.mkv", *case.clip)
    PUBLISHED[case.family].config().save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(case.settings))
    videos = videos_of(folder)
    assert videos is not None
    found = videos.load(VideoFile(folder / "a.mkv"))
    assert found.clip is not None
    assert found.rows == found.clip.moments * found.grid[0] * found.grid[1] // 4
    pixels = torch.from_numpy(found.patches).view(-1, found.clip.frames, 3, videos.patch_size**2)
    return seen((found.clip.moments, *found.grid), pixels.transpose(1, 2).contiguous(), found.clip.seconds)


def by_theirs(case: Case, folder: Path) -> Seen:
    drawn = write_clip(folder / "a.mkv", *case.clip)
    kind = transformers.Qwen3VLVideoProcessor if case.family == "qwen3_vl" else transformers.Qwen2VLVideoProcessor
    made = kind(**case.settings)(
        videos=[torch.from_numpy(drawn).permute(0, 3, 1, 2)],
        video_metadata=[VideoMetadata(total_num_frames=case.clip[0], fps=float(case.clip[3]))],
        do_sample_frames=True,
        return_metadata=True,
        return_tensors="pt",
    )
    (grid,), (metadata,) = made["video_grid_thw"].tolist(), made["video_metadata"]
    return seen(grid, made["pixel_values_videos"], 2 / metadata.sampled_fps)  # as Qwen2.5-VL's processor counts them


@pytest.mark.parametrize("case", OF_TRANSFORMERS)
def test_pixels_of_a_video_are_those_of_the_video_processor(case, tmp_path):
    found = by_ours(case, tmp_path)
    assert (found.grid, found.pixels) == (case.grid, case.pixels)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="the video processors of transformers need torchvision")
def test_the_video_processor_that_is_installed_makes_the_same_of_videos(tmp_path):
    for case in OF_TRANSFORMERS:
        expected = by_theirs(case, tmp_path)
        assert (expected.grid, expected.pixels) == (case.grid, case.pixels), case
        assert by_ours(case, tmp_path) == expected, case


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_positions_in_time_height_and_width_are_those_of_hugging_faces_model(family, tmp_path):
    samples, tiny = Samples(tmp_path, family), video_family(family)
    module = tiny.kind(tiny.config)
    module.configure_model()
    asked = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    for (batch, media), of_sample in zip(samples.single, samples.media, strict=True):
        inputs = as_hugging_face_takes_it(batch, media, module.model.config)
        given = {name: inputs[name] for name in asked if name in inputs}
        expected, _ = module.model.model.get_rope_index(**given)
        features = {"image": module.encode(pack_media(of_sample))} if of_sample else {}
        assert module.merge(batch, features)["position_ids"].tolist() == expected.tolist()
