"""Videos are opened, counted and decoded as a person sees them; what cannot be used is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

av = pytest.importorskip("av")

from flowtrain_lightning.data import VideoError  # noqa: E402
from flowtrain_lightning.data.media.media_files import EncodedMedia, VideoFile  # noqa: E402
from flowtrain_lightning.data.media.video_files import VideoHeader, decode_frames, read_video_header  # noqa: E402
from tests.tiny_videos import write_clip  # noqa: E402


@pytest.mark.parametrize(("name", "codec"), [("a.mkv", "ffv1"), ("a.avi", "ffv1"), ("a.mp4", "mpeg4")])
def test_a_header_says_how_many_frames_there_are_and_how_large_they_are(tmp_path, name, codec):
    write_clip(tmp_path / name, 7, 12, 16, 3, codec=codec)
    assert read_video_header(VideoFile(tmp_path / name)) == VideoHeader(7, 3.0, 12, 16)


def test_the_frames_that_are_asked_for_are_decoded(tmp_path):
    drawn = write_clip(tmp_path / "a.mkv", 7, 12, 16, 3)
    found = list(decode_frames(VideoFile(tmp_path / "a.mkv"), np.array([0, 3, 6])))
    np.testing.assert_array_equal(found, drawn[[0, 3, 6]])


def test_a_video_may_stand_in_the_data(tmp_path):
    drawn = write_clip(tmp_path / "a.mkv", 3, 12, 16, 3)
    video = VideoFile(EncodedMedia("a", (tmp_path / "a.mkv").read_bytes()))
    assert read_video_header(video).frames == 3
    np.testing.assert_array_equal(next(decode_frames(video, np.array([1]))), drawn[1])


def test_what_is_no_video_is_refused(tmp_path):
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "empty.mp4").touch()
    with av.open(tmp_path / "sound.mkv", "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    for name, words in {
        "missing.mp4": "there is no such file",
        ".": "it is a folder",
        "empty.mp4": "it is empty",
        "text.mp4": "no video that can be read; known are asf",
        "sound.mkv": "no pictures, only sound",
    }.items():
        with pytest.raises(VideoError, match=words):
            read_video_header(VideoFile(tmp_path / name))


def test_a_list_that_names_other_files_is_no_video(tmp_path):
    write_clip(tmp_path / "a.mkv", 3, 12, 16, 3)
    (tmp_path / "list.mp4").write_text(f"#EXTM3U\n#EXTINF:1,\nfile://{tmp_path}/a.mkv\n#EXT-X-ENDLIST\n")
    (tmp_path / "concat.mp4").write_text(f"ffconcat version 1.0\nfile '{tmp_path}/a.mkv'\n")
    for name in ("list.mp4", "concat.mp4"):
        with pytest.raises(VideoError, match="no video that can be read"):
            read_video_header(VideoFile(tmp_path / name))


def test_a_video_that_ends_before_its_header_says_so_is_refused(tmp_path):
    write_clip(tmp_path / "a.avi", 40, 32, 32, 10)
    content = (tmp_path / "a.avi").read_bytes()
    half = len(content) // 2
    video = VideoFile(tmp_path / "cut.avi")
    video.file.write_bytes(content[:half])
    with pytest.raises(VideoError, match="so it was cut"):
        read_video_header(video)
    video.file.write_bytes(content[:4] + (half - 8).to_bytes(4, "little") + content[8:half])  # it says to end there
    assert read_video_header(video).frames == 40
    with pytest.raises(VideoError, match=r"(only .* can|cannot) be decoded"):
        list(decode_frames(video, np.array([0, 39])))


def test_a_video_filmed_on_its_side_is_turned_upright(tmp_path):
    write_clip(tmp_path / "a.mp4", 3, 12, 16, 3, codec="mpeg4")
    video = VideoFile(tmp_path / "a.mp4")
    lying = np.stack(list(decode_frames(video, np.arange(3))))
    turn(tmp_path / "a.mp4")
    assert read_video_header(video)[2:] == (16, 12)
    np.testing.assert_array_equal(list(decode_frames(video, np.arange(3))), np.rot90(lying, -1, axes=(1, 2)))


def turn(path: Path) -> None:
    """Writes into an MP4 file that it must be turned by a quarter clockwise to be upright."""
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 4 + 40  # behind version, times, track, duration, layer, group and volume
    matrix = np.array([0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30], dtype=">i4")
    content[at : at + 36] = matrix.tobytes()
    path.write_bytes(content)
