"""How ``flowtrain profile`` prints: what was measured beside what was fitted, and what the data are like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowtrain_lightning.allocator import BACKBONE, PRECISIONS, ROLES
from flowtrain_lightning.allocator.devices import maker_device
from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.packing.cost_model import predict
from flowtrain_lightning.placement.data_profile import DataProfile
from flowtrain_lightning.placement.profile import Profile, ProfileOrigin, RoleProfile
from flowtrain_lightning.placement.text_table import text_table

_SHOWN = 5
"""Sizes of each half in the table."""


def profile_as_text(profile: Profile) -> str:
    """What was measured, for a terminal."""
    origin = profile.origin
    threads = origin.settings["threads"]
    heading = (
        f"{origin.module.split()[0]} on {origin.device}, {threads} thread{'s' if threads != 1 else ''}, "
        f"{origin.settings['precision']}"
    )
    parts = [heading, _times(profile), *(_half(role, profile) for role in ROLES)]
    if not profile.whole:
        parts.append("The halves did not fit whole. Each was measured with one and with two of its layers.")
    if (summed := profile.reduction) is not None:
        speed = f"{1e3 * summed.constant:.2f} ms and {1e9 * summed.seconds_per_byte:.2f} ms a megabyte"
        parts.append(f"{summed.ranks} ranks sum their gradients in {speed}.")
    return "\n\n".join(parts)


def _times(profile: Profile) -> str:
    lines = []
    for role in ROLES:
        half = profile.roles[role]
        ordered = sorted(half.measured, key=lambda item: item.tokens)
        for number in np.unique(np.linspace(0, len(ordered) - 1, _SHOWN).round().astype(int)) if ordered else ():
            item = ordered[number]
            fitted = predict(half.cost, item)
            lines.append(
                (
                    role,
                    f"{item.tokens:,.0f}",
                    f"{1e3 * item.seconds:.2f}",
                    f"{1e3 * fitted:.2f}",
                    f"{100 * (fitted / item.seconds - 1):+.1f} %",
                    "unknown" if half.flops is None else _speed(half.flops.of(item) / item.seconds),
                )
            )
    return text_table(("", "tokens", "measured ms", "fitted ms", "error", "speed"), lines)


def _half(role: str, profile: Profile) -> str:
    half = profile.roles[role]
    size = f"{half.parameters / 1e6:,.2f}M parameters"
    if not half.measured:
        return f"{role}: {size}; not measured, as no sample needs it."
    unit = "token" if role == BACKBONE else "patch"
    cost = half.cost
    terms = [f"{1e3 * cost.constant:.2f} ms", f"{1e6 * cost.linear:.2f} us a {unit}"]
    if cost.quadratic:
        terms.append(f"{1e9 * cost.quadratic:.2f} ns a pair")
    passes = "forward" if half.forward_share == 1 else "forward and backward"
    lines = [
        f"{role}: {size}, {'trained' if half.trains else 'frozen'}",
        f"{passes}: {' + '.join(terms)}; half of the errors are below {100 * half.error:.1f} %",
    ]
    if half.forward_share < 1:
        lines.append(f"of this the forward is {100 * half.forward_share:.0f} %")
    lines += _utilisation(half, profile.origin)
    if half.trains:
        lines.append(f"optimizer step: {1e3 * half.optimizer_seconds:.2f} ms")
    return "\n  ".join(lines)


def _utilisation(half: RoleProfile, origin: ProfileOrigin) -> list[str]:
    """FLOP/s of all sizes together, and the share of the peak where the device is known."""
    achieved = half.flops_per_second
    if achieved is None:
        return []
    line = f"computes at {_speed(achieved)}"
    device, precision = maker_device(origin.device), PRECISIONS.get(str(origin.settings["precision"]))
    if device is not None and precision is not None:
        most = device.peak_for(precision.computing)
        line += f", {100 * achieved / most:.1f} % of an {device.name}'s {_speed(most)}"
    return [line]


def _speed(flops_per_second: float) -> str:
    unit, size = ("T", 1e12) if flops_per_second >= 1e12 else ("G", 1e9)
    return f"{flops_per_second / size:,.1f} {unit}FLOP/s"


def data_as_text(data: DataProfile) -> str:
    """What the data are like, for a terminal."""
    sizes = data.sizes
    lengths: list[tuple[str, IntArray]] = [
        ("tokens of a sample", sizes.tokens),
        ("media items of a sample", np.diff(sizes.media_start)),
    ]
    if len(sizes.media_patches):
        lengths += [("patches of a media item", sizes.media_patches)]
        lengths += [("rows of features of a media item", sizes.media_rows)]
    table = text_table(
        ("", "least", "median", "mean", "95 %", "most"), [(name, *_spread(values)) for name, values in lengths]
    )
    return f"{_split_of_devices(data)}\n\n{table}"


def _split_of_devices(data: DataProfile) -> str:
    share = f"the encoder has {100 * data.encoder_share:.0f} % of the work"
    split = f"{data.encoder_devices} of {data.devices} devices"
    if data.stable:
        return f"Data: in every draw of {len(data.sizes):,} of {data.available:,} samples {share}, or so: {split}."
    return f"Data: in {len(data.sizes):,} of {data.available:,} samples {share}: {split}."


def _spread(values: IntArray | FloatArray) -> Sequence[str]:
    figures = [values.min(), np.median(values), values.mean(), np.percentile(values, 95), values.max()]
    return [f"{figure:,.1f}" if figure != round(float(figure)) else f"{figure:,.0f}" for figure in figures]
