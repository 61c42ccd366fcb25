"""Videos that are drawn for a test."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np


def write_clip(
    path: Path, frames: int, height: int, width: int, rate: int, *, codec: str = "ffv1", seed: int = 0
) -> np.ndarray:
    """Draws a video and gives its frames: ``[frames, height, width, 3]``; with another codec they are changed a bit."""
    drawn = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = width, height
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        for picture in drawn:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return drawn
