"""The picture of a profile: times as measured and fitted, and the lengths of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flowtrain_lightning.allocator import ROLES
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.packing.cost_model import predict
from flowtrain_lightning.placement.data_profile import DataProfile
from flowtrain_lightning.placement.profile import Profile, ProfileError, RoleProfile

_COLOUR, _OTHER = "#2a78d6", "#e8a33d"


def draw_profile(profile: Profile, data: DataProfile, path: Path) -> None:
    """Write a PNG: a panel for each half, and one for each length that the data have.

    Raises:
        ProfileError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ProfileError(
            "--plot needs matplotlib; install it with `pip install flowtrain-lightning[plot]`."
        ) from error
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3)
    for axes, role in zip(panels[:, 0], ROLES, strict=True):
        _draw_half(axes, role, profile.roles[role])
    sizes = data.sizes
    lengths = {
        "tokens of a sample": sizes.tokens,
        "media items of a sample": np.diff(sizes.media_start),
        "patches of a media item": sizes.media_patches,
        "rows of features of a media item": sizes.media_rows,
    }
    for axes, (name, values) in zip(panels[:, 1:].ravel(), lengths.items(), strict=True):
        _draw_lengths(axes, name, values)
    for axes in panels.ravel():
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path} cannot be written: {error}") from error


def _draw_half(axes: Any, role: str, half: RoleProfile) -> None:
    tokens = [item.tokens for item in half.measured]
    axes.plot(tokens, [1e3 * item.seconds for item in half.measured], "o", color=_COLOUR, label="measured")
    axes.plot(tokens, [1e3 * predict(half.cost, item) for item in half.measured], "x", color=_OTHER, label="fitted")
    axes.set_title(f"{role}: half of the errors below {100 * half.error:.1f} %", loc="left", fontsize=10)
    axes.set(xlabel="tokens of a batch", ylabel="ms", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


def _draw_lengths(axes: Any, name: str, values: IntArray) -> None:
    width = max(1, -(-int(np.ptp(values)) // 40)) if len(values) else 1  # whole numbers, so no bar ends between two
    edges = np.arange(values.min(), values.max() + 2 * width, width) - 0.5 if len(values) else 1
    axes.hist(values, bins=edges, color=_COLOUR)
    axes.set_ylabel("samples" if name.endswith("of a sample") else "media items")
    mean = f", {values.mean():,.1f} at the mean" if len(values) else ""
    axes.set_title(f"{name}{mean}", loc="left", fontsize=10)
