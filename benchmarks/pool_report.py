"""How the pool's figures look: tables of text and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import machine_line, table

Runs = Sequence[dict[str, Any]]
COLOURS = ("#1baa6f", "#8b8b85", "#2a78d6", "#d07b2a", "#8a5fbf")


def report(results: dict[str, Any]) -> str:
    """Everything as Markdown."""
    runs: Runs = results["runs"]
    parts = [
        machine_line(results["machine"]),
        "",
        ways_table(runs),
        hot_table(runs),
        stream_table(runs),
        wakeups_table(runs),
    ]
    if any(run["way"] == "device" for run in runs):
        parts.insert(-1, device_table(runs))
    for run in runs:
        if run["way"] == "waiting":
            parts.append(f"A reader that waits takes {100 * run['share']:.2f} % of a core ({run['cores']} cores).")
    return "\n".join(parts) + "\n"


def ways_table(runs: Runs) -> str:
    """Until the last reader has the tensor, and what the owner's call takes."""
    head = ["cores, readers, bytes", "way", "put", "there, median", "p99", "processor time", "put / memcpy", "/ pool"]
    rows = []
    for run in runs:
        if "bytes" not in run or run["way"] == "memcpy":
            continue
        rows.append(
            [
                f"{run['cores']}, {run['readers']}, {size_name(run['bytes'])}",
                run["way"],
                *(f"{run[name]:,.0f} us" for name in ("put_us", "there_us", "there_p99_us", "cpu_us")),
                *(f"{run[name]:.2f}" for name in ("put_over_memcpy", "there_over_pool")),
            ]
        )
    return table(head, rows)


def hot_table(runs: Runs) -> str:
    """The same for one reader, where the owner was at work before."""
    rows = [
        [
            f"{run['cores']}, {size_name(run['size'])}",
            run["of"],
            *(f"{run[name]:,.0f} us" if name in run else "" for name in ("put_us", "there_us", "there_p99_us")),
            f"{run['put_over_memcpy']:.2f}" if "put_over_memcpy" in run else "",
        ]
        for run in runs
        if run["way"] == "hot"
    ]
    return table(["owner at work: cores, bytes", "way", "put", "there, median", "p99", "put / memcpy"], rows)


def stream_table(runs: Runs) -> str:
    """An entry of 4 KiB among several."""
    rows = [
        [
            f"{run['cores']}, {run['burst']} at once",
            *(f"{run[name]:.1f} us" for name in ("cpu_us", "put_us", "copy_us")),
        ]
        for run in runs
        if run["way"] == "stream"
    ]
    return table(["put + get + release of 4 KiB", "processor time of both", "put", "memcpy"], rows)


def device_table(runs: Runs) -> str:
    """Entries that lie in GPU memory."""
    rows = [
        [
            size_name(run["device_bytes"]),
            f"{run['copy_us']:,.0f} us",
            f"{run['put_us']:,.0f} us",
            f"{run['bandwidth_share']:.2f}",
            f"{run['host_us']:,.0f} us",
        ]
        for run in runs
        if run["way"] == "device"
    ]
    return table(
        ["on a GPU: bytes", "device copy", "put, until it is there", "share of bandwidth", "host time of put"], rows
    )


def passing_table(sizes: Runs) -> str:
    """Entries from one process to another on one device; each is copied twice."""
    head = ["between two processes", "plain copy", "put + get", "share of half a copy", "host time of put"]
    rows = [
        [
            size_name(int(run["bytes"])),
            *(f"{run[name]:,.1f} GB/s" for name in ("copy_gigabytes", "passed_gigabytes")),
            f"{run['share']:.2f}",
            f"{run['host_us']:,.0f} us",
            str(run["through_host"]),
        ]
        for run in sizes
    ]
    return table([*head, "through host memory"], rows)


def wakeups_table(runs: Runs) -> str:
    """Mechanisms by themselves."""
    rows = []
    for run in runs:
        if run["way"] == "wake-up":
            before = "both idle before" if run["idle_before"] else "owner at work"
            rows.append(
                [f"{run['cores']}, {run['waker']}, {before}", f"{run['median_us']:,.1f} us", f"{run['p99_us']:,.1f} us"]
            )
    return table(["wake-up", "median", "p99"], rows)


def size_name(nbytes: int) -> str:
    """For example ``4 KiB``."""
    return f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"


def draw_ways(path: Path, runs: Runs) -> None:
    """Time until the reader has the tensor over its size, one line per way."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [run for run in runs if run.get("readers") == 1 and run["cores"] == "idle"]
    sizes = sorted({run["bytes"] for run in shown})
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = list(dict.fromkeys(run["way"] for run in shown if run["way"] != "memcpy"))
    for name, colour in zip(names, COLOURS, strict=False):
        points = {run["bytes"]: run["there_us"] for run in shown if run["way"] == name}
        axes.loglog(list(points), list(points.values()), "o-", color=colour, label=name)
    copies = {run["bytes"]: run["put_us"] for run in shown if run["way"] == "memcpy"}
    axes.loglog(list(copies), list(copies.values()), "--", color="black", label="memcpy alone")
    axes.set_xticks(sizes, [size_name(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylabel("microseconds until a sleeping reader has the tensor")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
