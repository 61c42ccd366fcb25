"""Results of the packing benchmark, as lines, a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLUMNS = (
    "pad",
    "imb",
    "imb_position",
    "idle_sync",
    "idle_acc",
    "encoder_idle",
    "idle_two",
    "mixcv",
    "max_delay",
    "us",
)


def show(result: dict[str, Any]) -> None:
    """Print a result as soon as it is known."""
    print(
        f"{result['data']:<15}{result['name']:<40}"
        + "".join(_cell(result.get(column)).rjust(13) for column in COLUMNS),
        flush=True,
    )


def table(results: list[dict[str, Any]]) -> str:
    """All results in Markdown."""
    head = ["data", "packer", "window", *COLUMNS, "bound"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        cells = [result["data"], result["name"], str(result["window"])]
        cells += [_cell(result.get(column)) for column in (*COLUMNS, "bound")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) and value < 100 else f"{value:.0f}"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Waiting ranks and packing time of every packer on the mix, by numbers that the legend explains."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    on_mix = [each for each in results if each["data"] == "mix" and each.get("idle_sync") is not None]
    for number, result in enumerate(on_mix, 1):
        point = max(result["idle_sync"], 1e-3), result["us"]
        colour = "#2a78d6" if result["name"].startswith("this") else "#8a8a85"
        axes.scatter(*point, color=colour, label=f"{number}  {result['name']}", zorder=3)
        beside = ((4, 3), (4, -9), (-13, 3), (-13, -9))[number % 4]  # of those that fall together each can be read
        axes.annotate(str(number), point, fontsize=8, xytext=beside, textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="idle at every microbatch, %", ylabel="microseconds per sample")
    axes.set_title("Mix: waiting ranks and packing time", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)
