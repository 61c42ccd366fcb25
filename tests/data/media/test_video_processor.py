"""Which frames of a video are taken, how large they become, and in which order their pixels are patches."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("av")

from flowtrain_lightning.data import VideoError, VideoProcessor
from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.data.media.image_processor import ImageProcessor
from flowtrain_lightning.data.media.media_files import VideoFile
from flowtrain_lightning.data.media.video_files import VideoHeader
from tests.tiny_videos import write_clip

TINY = {"patch_size": 2, "merge_size": 2, "min_pixels": 16, "max_pixels": 4096}
VIDEOS = VideoProcessor(**TINY, fps=2.0)


def test_frames_are_taken_evenly_from_the_whole_video():
    sampled = VIDEOS.sample(VideoHeader(30, 10.0, 8, 8))
    assert sampled.frames.tolist() == [0, 5, 10, 15, 20, 25]
    assert sampled.clip[:3] == (3, 2, 1.0)
    assert sampled.times == (0.25, 1.25, 2.25)


@pytest.mark.parametrize(
    ("frames", "rate", "settings", "taken"),
    [
        (30, 10.0, {"fps": 1.0}, 4),  # the fewest
        (1000, 10.0, {"max_frames": 9}, 8),  # the most, in whole moments
        (3, 10.0, {}, 2),
    ],
)
def test_there_are_a_fewest_and_a_most_frames(frames, rate, settings, taken):
    videos = VideoProcessor(**{**TINY, "fps": 2.0, **settings})
    assert len(videos.choose(frames, rate)) == taken


def test_frames_of_a_long_video_share_the_pixels_of_all():
    wide = VideoProcessor(**TINY, total_pixels=8 * 64)
    assert wide.size(4, 64, 64) == (8, 8)
    assert wide.size(16, 64, 64) == (4, 4)
    assert wide.size(1000, 64, 64) == (2, 2)  # never fewer than a frame's fewest


def test_what_is_no_video_for_the_encoder_is_refused():
    with pytest.raises(VideoError, match="it has 1 frames, but the encoder takes 2 together"):
        VIDEOS.sample(VideoHeader(1, 10.0, 8, 8))
    with pytest.raises(VideoError, match="2 pixels high and 500 wide"):
        VIDEOS.sample(VideoHeader(9, 10.0, 2, 500))
    with pytest.raises(ValueError, match="fps=0"):
        VideoProcessor(fps=0)
    with pytest.raises(ValueError, match="min_frames=9 and max_frames=8"):
        VideoProcessor(min_frames=9, max_frames=8)
    with pytest.raises(ValueError, match="min_pixels=9 and max_pixels=8"):
        VideoProcessor(min_pixels=9, max_pixels=8)


def test_patches_stand_moment_by_moment_and_in_each_patch_frame_by_frame(tmp_path):
    drawn = write_clip(tmp_path / "a.mkv", 4, 4, 8, 2)  # as large as it stays
    found = VIDEOS.load(VideoFile(tmp_path / "a.mkv"))
    assert (found.grid, found.rows, found.clip.moments) == ((2, 4), 4, 2)
    of_moments = found.pixels.reshape(2, 8, 2, -1)  # moments, patches, frames
    images = ImageProcessor(patch_size=2, merge_size=2, min_pixels=16, max_pixels=4096)
    for number, frame in enumerate(drawn):
        np.testing.assert_array_equal(of_moments[number // 2, :, number % 2], images.cut(frame, (2, 4)))


def test_videos_and_images_lie_in_one_encoder_batch(tmp_path):
    write_clip(tmp_path / "a.mkv", 4, 4, 8, 2)
    video = VIDEOS.load(VideoFile(tmp_path / "a.mkv"))
    image = video._replace(pixels=video.pixels[:8], rows=2, clip=None)
    packed = pack_media([video, image])
    assert packed.clips == (video.clip, None)
    assert packed.cu_seqlens.tolist() == [0, 8, 16, 24]
    assert packed.max_seqlen == 8
    assert packed.rows == (4, 2)
    assert packed.pixels.shape == (2 * 16 + 8, 12)
    assert pack_media([image]).clips == ()


def test_some_moments_of_a_video_are_loaded_as_they_are_in_the_whole(tmp_path):
    write_clip(tmp_path / "a.mkv", 8, 4, 8, 2)
    video = VideoFile(tmp_path / "a.mkv")
    whole, part = VIDEOS.load(video), VIDEOS.load(video, (1, 3))
    same = whole.between(1, 3)
    assert part._replace(pixels=None) == same._replace(pixels=None)
    np.testing.assert_array_equal(part.pixels, same.pixels)
    assert part.clip == whole.clip._replace(moments=2, before=1, behind=1)
    packed = pack_media([part])
    assert (packed.rows, packed.cu_seqlens.tolist(), len(packed.pixels)) == ((4,), [0, 8, 16], 32)


def test_another_rule_has_another_fingerprint():
    assert VIDEOS.fingerprint != VideoProcessor(**TINY, fps=1.0).fingerprint
