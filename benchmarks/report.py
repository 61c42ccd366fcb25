"""How results look: JSON with machine and versions, tables of text, and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowtrain_lightning.callbacks.timeline_recorder import COLOURS
from flowtrain_lightning.runtime.timeline import Span

BARS = ("#c9c9c4", "#8b8b85", "#1baa6f", "#2a78d6")


def write_results(folder: Path, name: str, results: Mapping[str, Any], text: str) -> None:
    """Write ``name.json`` and ``name.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first is flush left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "| " + " | ".join([first, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(head), rule, *map(line, rows)]) + "\n"


def machine_line(machine: Mapping[str, str]) -> str:
    """One sentence about the machine."""
    return (
        f"{machine['date']}, commit {machine['commit']}; {machine['cpu']}, {machine['cores']} cores (load "
        f"{machine['load']} at the start); Python {machine['python']}, torch {machine['torch']}, Lightning "
        f"{machine['lightning']}."
    )


def draw_bars(path: Path, groups: Mapping[str, Mapping[str, float]], names: Mapping[str, str], unit: str) -> None:
    """A group of bars per module, a bar per variant, and over each bar its ratio to the first one.

    Args:
        path: the PNG to write.
        groups: module -> variant -> value.
        names: variant -> what it is.
        unit: of the values.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for number, (variant, name) in enumerate(names.items()):
        places = [group + (number - (len(names) - 1) / 2) * width for group in range(len(groups))]
        values = [group[variant] for group in groups.values()]
        bars = axes.bar(places, values, width * 0.92, label=name, color=BARS[number])
        firsts = [next(iter(group.values())) for group in groups.values()]
        axes.bar_label(bars, [f"{v / f:.2f}x" for v, f in zip(values, firsts, strict=True)], fontsize=9, padding=2)
    axes.set_xticks(range(len(groups)), [f"encoder : backbone = {name}" for name in groups])
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def draw_schedules(path: Path, schedules: Mapping[str, Sequence[dict[str, Any]]], step: int) -> None:
    """One step of several schedules above each other, on one scale.

    Args:
        path: the PNG to write.
        schedules: title -> timelines of its ranks, see `callbacks.timeline_recorder.read_timelines`.
        step: which training step.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [len(timelines) for timelines in schedules.values()]
    figure = Figure(figsize=(11, 1.0 + 0.24 * sum(rows) + 0.6 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    for axes, (title, timelines) in zip(panels, schedules.items(), strict=True):
        _draw_lanes(axes, timelines, step)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False, labelsize=8)
    panels[-1].set_xlabel(f"milliseconds since step {step} began")
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _draw_lanes(axes: Any, timelines: Sequence[dict[str, Any]], step: int) -> None:
    shown = []
    for row, timeline in enumerate(timelines):
        spans = (Span(*span) for span in timeline["spans"])
        shown += [(row, span) for span in spans if span.stage == "train" and span.step == step]
    origin = min(span.start for _, span in shown)
    for row, span in shown:
        colour = COLOURS[span.name if span.name in COLOURS else span.kind]
        axes.barh(-row, (span.end - span.start) * 1e3, left=(span.start - origin) * 1e3, height=0.75, color=colour)
    axes.set_yticks([-row for row in range(len(timelines))], [str(timeline["label"]) for timeline in timelines])
