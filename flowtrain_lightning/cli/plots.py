"""The pictures that commands draw: of a packing, of a plan and of plans for many sizes, and of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from flowtrain_lightning.allocator import PlanningError
from flowtrain_lightning.allocator.candidates import usable_bytes
from flowtrain_lightning.cli.plan_bars import step_phases
from flowtrain_lightning.cli.plan_report import PlanReport
from flowtrain_lightning.packing import IntArray, PackingError
from flowtrain_lightning.packing.cost_model import predict
from flowtrain_lightning.packing.offline import OfflinePlan, OfflineSettings
from flowtrain_lightning.packing.step_plan import FloatArray
from flowtrain_lightning.placement.profile import Profile, ProfileError, RoleProfile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flowtrain_lightning.placement.data_profile import DataProfile  # which imports torch

COLOURS = {
    "forward": "#2a78d6",
    "backward": "#1b4f91",
    "exchange": "#e8a33d",
    "bubble": "#d9d9d4",
    "stragglers": "#c4a7d6",
    "sharding": "#1baa6f",
    "reduction": "#b3541e",
    "optimizer": "#7a5195",
    "waiting": "#c9c9c4",
    "idle": "#e3e3e0",
    "weights": "#2a78d6",
    "gradients": "#7fb2ea",
    "states": "#1b4f91",
    "activations": "#1baa6f",
    "logits": "#e8a33d",
    "features": "#b3541e",
    "overhead": "#c9c9c4",
}
"""Purpose of a phase or of memory -> its colour in the pictures of a plan."""

_COLOUR, _OTHER = "#2a78d6", "#e8a33d"
"""Colours of the main series of a picture, and of the one that it is compared with."""

_STEPS = 3
"""First steps of a packing that are drawn."""

_LEAST_ROWS, _LEAST_BINS = 3, 12
"""Bars for which there is room at least: one alone would fill its panel."""

_NARROW = 40
"""Letters of a title above one of three panels side by side."""


def draw_plan(report: PlanReport, path: Path) -> None:
    """Write a PNG: placements, the step in time, and the memory of the recommended plan."""
    figure = _figure(11, 6.5, PlanningError)
    upper, middle, lower = figure.subplots(3, 1)
    plan, problems, plans = report.shown, report.problems, report.choices.recommended.predictions
    bars = upper.barh([one.name for one in plans], [one.samples_per_second for one in plans], color="#8b8b85")
    bars[plans.index(report.choices.recommended.chosen)].set_color("#1baa6f")
    upper.bar_label(bars, [f"{100 * one.mfu:.1f} % MFU" for one in plans], padding=3)
    upper.margins(x=0.12)  # room for what is written behind the longest bar
    upper.set_xlabel("samples/s")
    _title(upper, report.verdict().splitlines()[0], 125)
    phases = step_phases(plan, problems)
    for role, spans in phases.items():
        for span in spans:
            middle.barh(role, span.seconds, left=span.start, color=COLOURS[span.purpose], label=span.purpose)
    middle.set_xlabel(f"seconds of a step ({plan.name})")
    limit = usable_bytes(problems.cluster) / 1e9
    for role, candidate in plan.chosen.items():
        start = 0.0
        for purpose, size in candidate.details(problems[role]).memory.at(0).items():
            lower.barh(role, size / 1e9, left=start, color=COLOURS[purpose], label=purpose)
            start += size / 1e9
    lower.axvline(limit, color="#b3541e", linewidth=1)
    lower.set_xlabel("GB on a device; the line is what can be planned for")
    for axes in (upper, middle, lower):
        rows = len(axes.get_yticks())
        axes.set_ylim(max(rows, _LEAST_ROWS) - 0.5, -0.5)  # the first one above
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (middle, lower):
        _legend(axes)
    _save(figure, path, PlanningError)


def draw_sweep(found: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write a PNG: samples per second and MFU of the best plan for every number of devices that fits.

    Raises:
        PlanningError: the module fits on none of the numbers of devices, or ``path`` cannot be written.
    """
    figure = _figure(8, 4.5, PlanningError)
    fitting = [each for each in found if each["placement"] is not None]
    if not fitting:
        raise PlanningError("The module fits on none of these numbers of devices, so there is nothing to draw.")
    devices = [each["devices"] for each in fitting]
    left = figure.add_subplot()
    left.plot(devices, [each["samples_per_second"] for each in fitting], "o-", color="#2a78d6")
    left.set(xscale="log", yscale="log", xlabel="devices", ylabel="samples/s")
    left.set_xticks(devices, [str(count) for count in devices])
    left.set_yticks(
        [each["samples_per_second"] for each in fitting], [f"{each['samples_per_second']:,.4g}" for each in fitting]
    )
    left.minorticks_off()
    right = left.twinx()
    right.plot(devices, [100 * each["mfu"] for each in fitting], "s--", color="#e8a33d")
    right.set_ylabel("MFU, %")
    right.set_ylim(0, 115 * max(each["mfu"] for each in fitting))  # space for the names above the points
    for each in fitting:
        point = (each["devices"], 100 * each["mfu"])
        right.annotate(each["placement"], point, textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8)
    left.margins(x=0.12)  # room for the names of the first and the last point
    _title(left, f"{title} (line: samples/s, dashes: MFU)", 100)
    _save(figure, path, PlanningError)


def _title(axes: Any, text: str, letters: int) -> None:
    """Above a panel, in lines of so many letters at most."""
    axes.set_title(fill(text, letters), loc="left", fontsize=10)


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axes.legend(named.values(), named, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)


def draw_packing(plan: OfflinePlan, costs: FloatArray, settings: OfflineSettings, path: Path) -> None:
    """Write a PNG: one bar per rank and microbatch of the first steps, sampler order above, packed below.

    Args:
        plan: the packing.
        costs: ``[samples]`` backbone cost of each.
        settings: how it was packed.
        path: the file to write.

    Raises:
        PackingError: matplotlib is not installed, there is no whole step, or ``path`` cannot be written.
    """
    if not plan.steps:
        raise PackingError("There is no whole step to draw; give more samples or a smaller step.")
    steps = plan.steps[:_STEPS]
    figure = _figure(11, 5, PackingError)
    upper, lower = figure.subplots(2, 1, sharex=True, sharey=True)
    packed, ordered = [], []
    for step in steps:
        bins = step.positions * settings.ranks
        packed.append(np.bincount(step.bin_of, costs[step.samples], minlength=bins))
        number = np.arange(len(step.samples)) * bins // max(1, len(step.samples))
        ordered.append(np.bincount(number, costs[step.samples], minlength=bins))
    for axes, loads, title in ((upper, ordered, "Equal counts in sampler order"), (lower, packed, "As packed")):
        grid = np.concatenate(loads).reshape(-1, settings.ranks)
        position = np.arange(grid.size) + np.repeat(np.arange(len(grid)), settings.ranks)
        axes.bar(position, grid.ravel(), width=1.0, color="#2a78d6", linewidth=0)
        edges = np.arange(len(grid)) * (settings.ranks + 1)
        axes.hlines(grid.max(axis=1), edges - 0.5, edges + settings.ranks - 0.5, color="#e8a33d", linewidth=1.5)
        idle = 100 * (1 - grid.sum() / settings.ranks / grid.max(axis=1).sum())
        axes.set_title(f"{title}: waiting at every microbatch, ranks are idle for {idle:.2f} % of the time", loc="left")
        axes.set_ylabel("cost")
        axes.spines[["top", "right"]].set_visible(False)
    lower.set_xticks([])
    lower.set_xlabel(f"microbatches of {len(steps)} steps, in groups that the {settings.ranks} ranks run together")
    _save(figure, path, PackingError)


def draw_profile(profile: Profile, data: DataProfile, path: Path) -> None:
    """Write a PNG: a panel for each half, and one for each length that the data have.

    Raises:
        ProfileError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure(11, 6.5, ProfileError)
    panels = figure.subplots(max(2, len(profile.roles)), 3)
    for axes, (role, half) in zip(panels[:, 0], profile.roles.items(), strict=True):
        _draw_half(axes, role, half)
    sizes = data.sizes
    lengths = {
        "tokens of a sample": sizes.tokens,
        "media items of a sample": np.diff(sizes.media_start),
        "patches of a media item": sizes.media_patches,
        "rows of features of a media item": sizes.media_rows,
    }
    for axes, (name, values) in zip(panels[:2, 1:].ravel(), lengths.items(), strict=True):
        _draw_lengths(axes, name, values)
    for axes in panels[2:, 1:].ravel():
        axes.set_axis_off()
    for axes in panels.ravel():
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path, ProfileError)


def _draw_half(axes: Any, role: str, half: RoleProfile) -> None:
    tokens = [item.tokens for item in half.measured]
    axes.plot(tokens, [1e3 * item.seconds for item in half.measured], "o", color=_COLOUR, label="measured")
    axes.plot(tokens, [1e3 * predict(half.cost, item) for item in half.measured], "x", color=_OTHER, label="fitted")
    _title(axes, f"{role}: half of the errors below {100 * half.error:.1f} %", _NARROW)
    axes.set(xlabel="tokens of a batch", ylabel="ms", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


def _draw_lengths(axes: Any, name: str, values: IntArray) -> None:
    width = max(1, -(-int(np.ptp(values)) // 40)) if len(values) else 1  # whole numbers, so no bar ends between two
    edges = np.arange(values.min(), values.max() + 2 * width, width) - 0.5 if len(values) else 1
    axes.hist(values, bins=edges, color=_COLOUR)
    if len(values) and (room := _LEAST_BINS - np.ptp(values) / width) > 0:
        axes.set_xlim(values.min() - room * width / 2, values.max() + room * width / 2)
        axes.set_xticks(np.unique([values.min(), values.max()]))
    axes.set_ylabel("samples" if name.endswith("of a sample") else "media items")
    mean = f", {values.mean():,.1f} at the mean" if len(values) else ""
    _title(axes, f"{name}{mean}", _NARROW)


def _figure(width: float, height: float, kind: type[Exception]) -> Figure:
    """An empty figure of so many inches; raises an error of this kind where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise kind("--plot needs matplotlib; install it with: pip install 'flowtrain-lightning[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path, kind: type[Exception]) -> None:
    """Writes the PNG; raises an error of this kind where that cannot be."""
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise kind(f"{path} cannot be written: {error}") from error
