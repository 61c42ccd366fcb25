"""Records whose media take long to decode: 4K JPEGs, and clips in H.264."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PICTURE, CLIP = (2160, 3840), (720, 1280)
"""Height and width in pixels."""

_FRAMES, _RATE = 48, 24
_FILES = 12
"""That differ; records name them in turns, so that all are in the cache of the system."""


def write_pictures(folder: Path, count: int, shape: tuple[int, int] = PICTURE) -> Path:
    """Records of one picture each: soft colours with grain, as photographs have."""
    generator = np.random.default_rng(0)
    soft = _soft(generator, shape)
    for number in range(min(count, _FILES)):
        grain = generator.integers(-12, 13, soft.shape, dtype=np.int16)
        Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=90)
    return _write_records(folder, count, "images", "<image>", "jpg")


def write_clips(folder: Path, count: int, shape: tuple[int, int] = CLIP) -> Path:
    """Records of one clip of two seconds each, in which a picture moves under grain."""
    import av

    generator = np.random.default_rng(0)
    soft = _soft(generator, shape)
    for number in range(min(count, _FILES)):
        with av.open(folder / f"{number}.mp4", "w") as container:
            stream: Any = container.add_stream("h264", rate=_RATE)
            stream.width, stream.height, stream.pix_fmt = shape[1], shape[0], "yuv420p"
            for frame in range(_FRAMES):
                grain = generator.integers(-12, 13, soft.shape, dtype=np.int16)
                drawn = np.clip(np.roll(soft, 8 * frame + number, axis=1) + grain, 0, 255).astype(np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(drawn, format="rgb24")))
            container.mux(stream.encode())
    return _write_records(folder, count, "videos", "<video>", "mp4")


def _soft(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.int16]]:
    coarse = generator.integers(0, 256, (9, 16, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize(shape[::-1], Image.Resampling.BICUBIC), dtype=np.int16)


def _write_records(folder: Path, count: int, field: str, mark: str, ending: str) -> Path:
    records = []
    for number in range(count):
        turns = [
            {"role": "user", "content": f"{mark}What is it?"},
            {"role": "assistant", "content": f"It is number {number}."},
        ]
        records.append(json.dumps({field: [{"path": f"{number % _FILES}.{ending}"}], "messages": turns}) + "\n")
    file = folder / "train.jsonl"
    file.write_text("".join(records))
    return file
