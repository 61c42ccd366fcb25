"""The tables of `emulate_layouts.py`, and whether its aims are reached."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from benchmarks.layout_plans import KINDS, RECOMMENDED, SYNCHRONOUS, UNSHARDED
from benchmarks.report import machine_line, table

OVER_UNIFORM, OVER_SYNCHRONOUS, BEHIND = 1.35, 1.7, 0.02
"""Aims: the best placement over the uniform one and over the batch-synchronous one, in one cell at least; and how far
the choice may be behind the best, in every cell."""


def cells_text(cells: Mapping[str, Any]) -> str:
    """All cells: what was measured beside what was predicted, ratios beside the paper's, and choices."""
    shown = {name: {kind: _seconds(run) for kind, run in cell["runs"].items()} for name, cell in cells.items()}
    machines = dict.fromkeys(machine_line(cell["machine"]) for cell in cells.values())
    parts = [
        "Seconds of a step, measured (simulated; planned). Computing is sleep, for as long as the planner's model says "
        "for the module, device and layout; all else is a real run. *Uniform*: one layout for both halves; "
        "*unsharded*: of these the fastest whose weights data ranks have whole, as in Megatron-LM (optimizer states "
        "may be shared), without pipelines. *Batch-synchronous*: ranks of their own, dealt so that encoding a step and "
        "then computing it take the least time, which is what they do. A dash: no plan of the kind fits, or none that "
        "gains anything by its kind.",
        table(["module and data", *KINDS], [_times(name, cells[name]["runs"], each) for name, each in shown.items()]),
        table(
            [
                "module and data",
                "best",
                f"x {UNSHARDED} (FlowTrain x Megatron-LM)",
                "x uniform",
                f"x {SYNCHRONOUS} (FlowTrain x DistTrain)",
                "a run's choice by simulated times",
                "behind best",
                "choice of `flowtrain plan`",
                "behind best",
                "cores used by ranks, at most",
            ],
            [_ratios(name, cells[name], each) for name, each in shown.items()],
        ),
        _aims(cells, shown),
        "Layouts:",
        "\n".join(
            f"- {name}, {kind}: {run['plan']}" for name, cell in cells.items() for kind, run in cell["runs"].items()
        ),
        "\n".join(machines),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _seconds(run: Mapping[str, float]) -> float:
    """Of a step on the device that a run stands for."""
    return run["step"] / run["stretch"]


def _times(name: str, runs: Mapping[str, Any], seconds: Mapping[str, float]) -> list[str]:
    def cell(kind: str) -> str:
        if (run := runs.get(kind)) is None:
            return "-"
        simulated = f"{run['simulated']:.2f}; " if "simulated" in run else ""
        return f"{seconds[kind]:.2f} ({simulated}{run['predicted']:.2f})"

    return [name, *map(cell, KINDS)]


def _ratios(name: str, cell: Mapping[str, Any], seconds: Mapping[str, float]) -> list[str]:
    best = min(seconds, key=lambda kind: seconds[kind])

    def over(kind: str) -> str:
        return f"{seconds[kind] / seconds[best]:.2f}" if kind in seconds else "-"

    choices = [
        shown
        for choice, run in _chosen_runs(cell).items()
        for shown in (cell["chosen"][choice], f"{behind(seconds, run):.1%}")
    ]
    mix, cores = cell["mix"], max(run["cores"] for run in cell["runs"].values())
    return [
        name,
        best,
        f"{over(UNSHARDED)} ({mix['over_uniform']:.2f})",
        over("uniform"),
        f"{over(SYNCHRONOUS)} ({mix['over_synchronous']:.2f})",
        *choices,
        f"{cores:.0%} of {os.cpu_count()}",
    ]


def _chosen_runs(cell: Mapping[str, Any]) -> dict[str, str]:
    """Who chooses -> the kind of run that is chosen."""
    return {"run": cell["chosen"]["run"], "planner": RECOMMENDED}


def behind(seconds: Mapping[str, float], kind: str) -> float:
    """By what share one kind is slower than the fastest one."""
    return seconds[kind] / min(seconds.values()) - 1


def _aims(cells: Mapping[str, Any], shown: Mapping[str, Mapping[str, float]]) -> str:
    lines = []
    for kind, aim in ((UNSHARDED, OVER_UNIFORM), ("uniform", OVER_UNIFORM), (SYNCHRONOUS, OVER_SYNCHRONOUS)):
        ratios = {name: each[kind] / min(each.values()) for name, each in shown.items() if kind in each}
        most = max(ratios, key=lambda name: ratios[name], default=None)
        found = f"{ratios[most]:.2f} ({most})" if most is not None else "nothing"
        reached = most is not None and ratios[most] >= aim
        lines.append(f"- At least {aim} x {kind} in one cell: {'reached' if reached else 'missed'}, {found}.")
    for choice, who in (("run", "of a run by simulated times"), ("planner", "of `flowtrain plan`")):
        late = {name: behind(each, _chosen_runs(cells[name])[choice]) for name, each in shown.items()}
        missed = [f"{name} ({share:.1%})" for name, share in late.items() if share > BEHIND]
        verdict = f"missed in {', '.join(missed)}" if missed else f"reached, at most {max(late.values()):.1%}"
        lines.append(f"- The choice {who} within {BEHIND:.0%} of the best in every cell: {verdict}.")
    runs = [run for cell in cells.values() for run in cell["runs"].values() if "simulated" in run]
    over = [_seconds(run) / run["simulated"] - 1 for run in runs]
    lines.append(f"- Measured beside simulated seconds: {min(over):+.1%} to {max(over):+.1%}.")
    return "\n".join(lines)
