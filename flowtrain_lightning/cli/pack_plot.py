"""The picture of a packing: what each rank's microbatches cost, in sampler order and as packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flowtrain_lightning.packing import PackingError
from flowtrain_lightning.packing.offline import OfflinePlan, OfflineSettings
from flowtrain_lightning.packing.step_plan import FloatArray

_STEPS = 3


def draw(plan: OfflinePlan, costs: FloatArray, settings: OfflineSettings, path: Path) -> None:
    """Write a PNG: one bar per rank and microbatch of the first steps, sampler order above, packed below.

    Args:
        plan: the packing.
        costs: ``[samples]`` backbone cost of each.
        settings: how it was packed.
        path: the file to write.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackingError(
            "--plot needs matplotlib; install it with `pip install flowtrain-lightning[plot]`."
        ) from error
    if not plan.steps:
        raise PackingError("There is no whole step to draw; give more samples or a smaller step.")
    steps = plan.steps[:_STEPS]
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
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
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise PackingError(f"{path} cannot be written: {error}") from error
