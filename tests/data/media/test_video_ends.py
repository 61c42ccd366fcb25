"""A video file that was cut is refused where its format says how long it is, and not shown shorter without a word."""

import io
import struct

import numpy as np
import pytest

av = pytest.importorskip("av")

from flowtrain_lightning.data.media.media_files import EncodedMedia, VideoFile  # noqa: E402
from flowtrain_lightning.data.media.video_ends import is_cut  # noqa: E402
from flowtrain_lightning.data.media.video_files import VideoError, decode_frames, read_video_header  # noqa: E402

FORMS = {
    "mp4": ("mpeg4", {}),
    "fragments": ("libx264", {"movflags": "frag_keyframe+empty_moov"}),
    "mov": ("mpeg4", {}),
    "matroska": ("mpeg4", {}),
    "webm": ("libvpx", {}),
    "avi": ("mpeg4", {}),
    "asf": ("mpeg4", {}),
    "gif": ("gif", {}),
    "flv": ("flv1", {}),
    "flv of h264": ("h264", {}),
    "ogg": ("libvpx", {}),
}

ENDLESS = {
    "mpeg": ("mpeg1video", {}),
    "vob": ("mpeg2video", {}),
    "mpegts": ("mpeg2video", {}),
    "mpegts of h264": ("h264", {}),
    "m2ts": ("h264", {"mpegts_m2ts_mode": "1"}),
}
"""Formats that have no end, with the codec and options."""

MUXERS = {"fragments": "mp4", "flv of h264": "flv", "mpegts of h264": "mpegts", "m2ts": "mpegts"}


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
    codec, options = {**FORMS, **ENDLESS}[form]
    file = file or io.BytesIO()
    chance = np.random.default_rng(0)
    with av.open(file, "w", format=MUXERS.get(form, form), options=options) as container:
        stream = container.add_stream(codec, rate=25 if codec in ("mpeg1video", "mpeg2video") else 4)
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


@pytest.mark.parametrize(
    "form", ["flv", "ogg", *(pytest.param(each, marks=pytest.mark.full) for each in ("gif", "flv of h264"))]
)
def test_every_cut_is_seen_where_the_end_is_marked(form):
    content = clip(form)
    last = len(content) - (4 if form.startswith("flv") else 0)  # of FLV the size of the last tag, behind it, may lack
    assert [place for place in range(64, last) if not is_cut(io.BytesIO(content[:place]))] == []
    assert not is_cut(io.BytesIO(content + b"\0\0"))


def test_a_video_of_a_recorder_that_copied_what_its_server_said_is_read():
    content = clip("flv")
    size = content.index(b"filesize") + len(b"filesize") + 1
    longer = content[:size] + struct.pack(">d", len(content) + 1000.0) + content[size + 8 :]
    assert not is_cut(io.BytesIO(longer))
    assert len(shown(longer)) == 12


LONGER = [pytest.param(form, marks=pytest.mark.full) for form in ("vob", "mpegts of h264", "m2ts")]


@pytest.mark.parametrize("form", ["mpeg", "mpegts", *LONGER])
def test_of_a_format_without_an_end_a_cut_within_a_packet_is_refused(form):
    content = clip(form)
    assert len(shown(content)) == 12
    begins = (b"\0\0\1",) if form in ("mpeg", "vob") else (b"\x47",)
    mark = 4 if form == "m2ts" else 0
    for place in range(1000, len(content)):
        if not is_cut(io.BytesIO(content[:place])):
            near = content[place - 2 : place + mark + 3]
            assert any(begin in near for begin in begins), place
    with pytest.raises(VideoError, match="it was cut"):
        shown(content[:-100])


@pytest.mark.parametrize("form", ["matroska", "webm", "fragments", "flv", "ogg", "mpeg", "mpegts"])
def test_a_video_that_was_sent_while_it_was_written_is_read(form):
    content = clip(form, OneWay())
    assert not is_cut(io.BytesIO(content))
    assert len(shown(content)) == 12


@pytest.mark.parametrize(
    "content",
    [b"", b"\x1a\x45\xdf\xa3", b"RIFF", b"\0\0\0\x08ftyp", b"GIF89a" + bytes(7) + b";\0\n", b"FLV", b"G", b"no video"],
)
def test_of_what_says_no_length_nothing_is_said(content):
    file = io.BytesIO(content)
    assert not is_cut(file)
    assert file.tell() == 0
