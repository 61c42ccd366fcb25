"""Rows of the packing benchmark, as lines, a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLUMNS = ("pad", "imb", "row", "idle_sync", "idle_acc", "encoder_idle", "idle_two", "mixcv", "max_delay", "us")


def show(row: dict[str, Any]) -> None:
    """Print a row as soon as it is known."""
    print(
        f"{row['data']:<15}{row['name']:<40}" + "".join(_cell(row.get(column)).rjust(10) for column in COLUMNS),
        flush=True,
    )


def table(results: list[dict[str, Any]]) -> str:
    """All rows in Markdown."""
    head = ["data", "packer", "window", *COLUMNS, "bound"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in results:
        cells = [row["data"], row["name"], str(row["window"])]
        cells += [_cell(row.get(column)) for column in (*COLUMNS, "bound")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) and value < 100 else f"{value:.0f}"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Waiting ranks and packing time of every packer, on the mix."""
    rows = [row for row in results if row["data"] == "mix"]
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row in rows:
        own = row["name"].startswith("this")
        axes.scatter(max(row["idle_sync"], 1e-3), row["us"], color="#2a78d6" if own else "#8a8a85", zorder=3)
        axes.annotate(
            row["name"], (max(row["idle_sync"], 1e-3), row["us"]), fontsize=7, xytext=(4, 3), textcoords="offset points"
        )
    axes.set(xscale="log", yscale="log", xlabel="idle at every microbatch, %", ylabel="microseconds per sample")
    axes.set_title("Mix: waiting ranks and packing time", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
