"""Which colours a drawing shows, by simple names: the second question of the quickstart's data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHARE = 0.12  # of the drawing's pixels that a colour must cover to be named
NAMES = 3  # at most, of one drawing
PALE, DARK, GREY = 0.88, 0.22, 0.18
# Where on the colour circle, in degrees, one hue's name ends and the next begins.
HUES = ((15, "red"), (45, "orange"), (68, "yellow"), (165, "green"), (260, "blue"), (330, "purple"), (360, "red"))


def main_colours(pixels: NDArray[np.uint8]) -> tuple[str, ...]:
    """The names of the main colours, the largest first.

    Args:
        pixels: ``[pixels, 3]`` red, green and blue of the drawing, without its transparent ground.
    """
    if len(pixels) == 0:
        return ("white",)
    names, counts = np.unique(_names(pixels.astype(np.float64) / 255.0), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    large = [str(names[i]) for i in order if counts[i] >= SHARE * len(pixels)]
    return tuple((large or [str(names[order[0]])])[:NAMES])


def _names(pixels: NDArray[np.float64]) -> NDArray[np.str_]:
    """``[pixels]`` the colour name of every pixel."""
    red, green, blue = pixels.T
    value, low = pixels.max(axis=1), pixels.min(axis=1)
    spread = np.where(value > low, value - low, 1.0)
    hue = np.select(
        [value == red, value == green],
        [(green - blue) / spread % 6, (blue - red) / spread + 2],
        (red - green) / spread + 4,
    )
    limits = np.array([limit for limit, _ in HUES])
    hues = np.array([name for _, name in HUES] + ["red"])
    named = hues[np.searchsorted(limits, 60 * hue, side="right")]
    named = np.where((named == "orange") & (value < 0.6), "brown", named)
    grey = np.where(value > PALE, "white", np.where(value < DARK, "black", "grey"))
    return np.where((value < DARK) | (value - low < GREY * np.maximum(value, 0.5)), grey, named)
