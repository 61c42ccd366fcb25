"""A video file that was cut is refused where its format says how long it is, and not shown shorter without a word."""

import io

import numpy as np
import pytest

av = pytest.importorskip("av")

from flowtrain_lightning.data.media_files import EncodedMedia, VideoFile  # noqa: E402
from flowtrain_lightning.data.video_ends import is_cut  # noqa: E402
from flowtrain_lightning.data.video_files import VideoError, decode_frames, read_video_header  # noqa: E402

FORMS = {
    "mp4": ("mpeg4", {}),
    "fragments": ("libx264", {"movflags": "frag_keyframe+empty_moov"}),
    "mov": ("mpeg4", {}),
    "matroska": ("mpeg4", {}),
    "webm": ("libvpx", {}),
    "avi": ("mpeg4", {}),
    "asf": ("mpeg4", {}),
    "gif": ("gif", {}),
}


class OneWay(io.RawIOBase):
    """Takes bytes as a connection does: what was sent cannot be changed."""

    def __init__(self):
        self.content = b""

    def writable(self):
        return True

    def write(self, data):
        self.content += bytes(data)
        return len(data)


def clip(form, file=None):
    """A video of twelve frames."""
    codec, options = FORMS[form]
    file = file or io.BytesIO()
    chance = np.random.default_rng(0)
    with av.open(file, "w", format="mp4" if form == "fragments" else form, options=options) as container:
        stream = container.add_stream(codec, rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "rgb8" if codec == "gif" else "yuv420p"
        for _ in range(12):
            pixels = chance.integers(0, 256, (16, 32, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.content if isinstance(file, OneWay) else file.getvalue()


def shown(content):
    video = VideoFile(EncodedMedia("a", content))
    frames = read_video_header(video).frames
    return np.stack(list(decode_frames(video, np.arange(frames, dtype=np.int64))))


@pytest.mark.parametrize("form", FORMS)
def test_a_video_that_was_cut_anywhere_is_refused_or_shown_whole(form):
    content = clip(form)
    whole = shown(content)
    assert len(whole) == 12
    for place in range(1, len(content), max(1, len(content) // 25)):
        try:
            found = shown(content[:place])
        except VideoError:
            continue
        np.testing.assert_array_equal(found, whole, err_msg=str(place))


@pytest.mark.parametrize("form", ["matroska", "webm", "fragments"])
def test_a_video_that_was_sent_while_it_was_written_is_read(form):
    content = clip(form, OneWay())
    assert not is_cut(io.BytesIO(content))
    assert len(shown(content)) == 12


@pytest.mark.parametrize(
    "content", [b"", b"\x1a\x45\xdf\xa3", b"RIFF", b"\0\0\0\x08ftyp", b"GIF89a;\0\n", b"no video at all"]
)
def test_of_what_says_no_length_nothing_is_said(content):
    file = io.BytesIO(content)
    assert not is_cut(file)
    assert file.tell() == 0
