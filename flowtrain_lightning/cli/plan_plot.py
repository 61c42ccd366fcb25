"""The pictures of a plan: step and memory of every role, and a sweep over numbers of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowtrain_lightning.allocator import BACKBONE, PlanningError
from flowtrain_lightning.allocator.candidates import usable_bytes
from flowtrain_lightning.cli.plan_report import PlanReport, step_phases

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "forward": "#2a78d6",
    "backward": "#1b4f91",
    "exchange": "#e8a33d",
    "bubble": "#d9d9d4",
    "stragglers": "#c4a7d6",
    "sharding": "#1baa6f",
    "reduction": "#b3541e",
    "optimizer": "#7a5195",
    "waiting": "#efefec",
    "idle": "#f7f7f5",
    "weights": "#2a78d6",
    "gradients": "#7fb2ea",
    "states": "#1b4f91",
    "activations": "#1baa6f",
    "logits": "#e8a33d",
    "features": "#b3541e",
    "overhead": "#c9c9c4",
}


def draw_plan(report: PlanReport, path: Path) -> None:
    """Write a PNG: placements, the step in time, and the memory of the recommended plan."""
    figure = _figure(11, 6.5)
    upper, middle, lower = figure.subplots(3, 1)
    plan, problems, plans = report.shown, report.problems, report.choices.recommended.predictions
    bars = upper.barh([one.name for one in plans], [one.samples_per_second for one in plans], color="#8b8b85")
    bars[plans.index(report.choices.recommended.chosen)].set_color("#1baa6f")
    upper.bar_label(bars, [f"{100 * one.mfu:.1f} % MFU" for one in plans], padding=3)
    upper.set_xlabel("samples/s")
    upper.set_title(report.verdict().splitlines()[0], loc="left", fontsize=10)
    phases = step_phases(plan, problems)
    for role, spans in phases.items():
        for span in spans:
            middle.barh(role, span.seconds, left=span.start, color=COLOURS[span.purpose], label=span.purpose)
    middle.set_xlabel(f"seconds of a step ({plan.name})")
    limit = usable_bytes(problems[BACKBONE].cluster) / 1e9
    for role, candidate in plan.chosen.items():
        start = 0.0
        for purpose, size in candidate.details(problems[role]).memory.at(0).items():
            lower.barh(role, size / 1e9, left=start, color=COLOURS[purpose], label=purpose)
            start += size / 1e9
    lower.axvline(limit, color="#b3541e", linewidth=1)
    lower.set_xlabel("GB on a device; the line is what can be planned for")
    for axes in (upper, middle, lower):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (middle, lower):
        _legend(axes)
    _save(figure, path)


def draw_sweep(found: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write a PNG: samples per second and MFU of the best plan for every number of devices that fits."""
    figure = _figure(8, 4.5)
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
    left.set_title(f"{title} (line: samples/s, dashes: MFU)", loc="left", fontsize=10)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanningError(
            "--plot needs matplotlib; install it with `pip install flowtrain-lightning[plot]`."
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axes.legend(named.values(), named, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise PlanningError(f"{path} cannot be written: {error}") from error
