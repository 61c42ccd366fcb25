"""The report's pictures: the course of the loss, and unseen drawings with what was generated for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

TRAINING, VALIDATION = "#2a78d6", "#d6542a"
Curve = list[tuple[int, float]]
"""Step and loss, in order."""


@dataclass(frozen=True)
class Answer:
    """What was generated for one drawing."""

    picture: Path
    true: str
    generated: str


def draw_loss(training: Curve, validation: Curve, path: Path) -> None:
    """Draw both courses of the loss as a PNG; training also smoothed over 15 points."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = np.array(training).T
    axes.plot(steps, losses, color=TRAINING, alpha=0.25, linewidth=0.8)
    width = min(15, len(losses))
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    axes.plot(steps[width - 1 :], smooth, color=TRAINING, label="training (mean of 15 steps)")
    axes.plot(*np.array(validation).T, "o-", color=VALIDATION, markersize=4, label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per target token")
    axes.set_ylim(0, min(float(losses.max()), 4.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140)


def draw_answers(answers: Sequence[Answer], path: Path) -> None:
    """Draw the drawings as a PNG, each above its true and its generated keywords."""
    figure = Figure(figsize=(2.2 * len(answers), 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, answer in zip(figure.subplots(1, len(answers), squeeze=False)[0], answers, strict=True):
        with Image.open(answer.picture) as picture:
            axes.imshow(picture.convert("RGB"))
        axes.set_anchor("S")
        axes.axis("off")
        for words, below, colour in ((answer.true, 6, "black"), (answer.generated, 20, VALIDATION)):
            axes.annotate(
                words,
                (0.5, 0),
                (0, -below),
                xycoords="axes fraction",
                textcoords="offset points",
                horizontalalignment="center",
                verticalalignment="top",
                fontsize=8,
                color=colour,
            )
    figure.suptitle("Drawings it never saw: true keywords, generated keywords", fontsize=9)
    figure.savefig(path, dpi=140)
