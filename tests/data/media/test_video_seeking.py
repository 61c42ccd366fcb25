"""Frames in the middle of a video are equal to the bit to those of a whole decoding, whatever the file looks like."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

av = pytest.importorskip("av")

from flowtrain_lightning.data.media.media_files import VideoFile  # noqa: E402
from flowtrain_lightning.data.media.video_files import decode_frames  # noqa: E402
from flowtrain_lightning.data.media.video_seeking import frames_after_seeking  # noqa: E402

FRAMES = 40
SEEN = {
    "h264.mp4": ("libx264", {"g": "8", "bf": "2"}),
    "h264.mkv": ("libx264", {"g": "8", "bf": "3", "x264-params": "scenecut=0:b-pyramid=normal"}),
    "hevc.mp4": ("libx265", {"x265-params": "keyint=8:bframes=2:log-level=none"}),
    "mpeg4.mp4": ("mpeg4", {"g": "8", "bf": "2"}),
    "mpeg4.avi": ("mpeg4", {"g": "8"}),
    "ffv1.mkv": ("ffv1", {}),
}
"""Name -> encoder and its options, of what is begun in the middle."""

WHOLE = {
    "open.mp4": ("libx264", {"g": "8", "x264-params": "open-gop=1"}),
    "refresh.mkv": ("libx264", {"g": "8", "x264-params": "intra-refresh=1"}),
    "one.mp4": ("libx264", {"g": "400"}),
    "vp9.webm": ("libvpx-vp9", {"g": "8"}),
    "b.avi": ("mpeg4", {"g": "8", "bf": "2"}),
}
"""The same of what is decoded from its beginning: its pictures look back, its packets need not be frames, or have no
times of their own."""


def write(path: Path, codec: str, options: dict[str, str], times: list[int]) -> VideoFile:
    """A video of noise that moves, shown at these times in thousandths of a second."""
    noise = np.random.default_rng(0).integers(0, 256, (48, 64 + FRAMES, 3), dtype=np.uint8)
    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "bgr0" if codec == "ffv1" else "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for number, time in enumerate(times):
            picture = np.ascontiguousarray(noise[:, number : number + 64] // 2 + number)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return VideoFile(path)


def sought(video: VideoFile, numbers: np.ndarray) -> int:
    """How many of some frames are found by seeking."""
    with av.open(video.file) as container:
        return len(list(frames_after_seeking(container, container.streams.video[0], numbers)))


SHORT = ("h264.mp4", "mpeg4.avi", "refresh.mkv")
CASES = [(name, True) if name in SHORT else pytest.param(name, True, marks=pytest.mark.full) for name in SEEN | WHOLE]
CASES += [pytest.param(name, False, marks=pytest.mark.full) for name in SEEN | WHOLE]


@pytest.mark.parametrize(("name", "unequal"), CASES)
def test_frames_in_the_middle_are_those_of_the_whole_video(tmp_path: Path, name: str, unequal: bool) -> None:
    codec, options = (SEEN | WHOLE)[name]
    draw = np.random.default_rng(1)
    gaps = draw.integers(10, 90, FRAMES) if unequal and not name.endswith("avi") else np.full(FRAMES, 40)
    video = write(tmp_path / name, codec, options, np.cumsum(gaps).tolist())
    whole = list(decode_frames(video, np.arange(FRAMES)))
    assert len(whole) == FRAMES
    for begin, end in [(1, 2), (9, 14), (17, 18), (24, FRAMES), (31, 39)]:
        numbers = np.arange(begin, end)[draw.random(end - begin) < 0.8]
        if len(numbers):
            np.testing.assert_array_equal(list(decode_frames(video, numbers)), np.stack(whole)[numbers])
    late = np.arange(30, FRAMES)
    assert sought(video, late) == (len(late) if name in SEEN else 0)


def test_a_frame_that_is_not_there_is_named_as_ever(tmp_path: Path) -> None:
    video = write(tmp_path / "a.mp4", "libx264", {"g": "8"}, [40 * number for number in range(FRAMES)])
    with pytest.raises(ValueError, match=f"frame {FRAMES + 1} is there, but only {FRAMES} can be decoded"):
        list(decode_frames(video, np.array([30, FRAMES])))
