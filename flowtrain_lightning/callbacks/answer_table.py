"""A table of pictures, prompts, answers and truths, for Weights & Biases, TensorBoard, or a file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from flowtrain_lightning.data import Record
from flowtrain_lightning.data.image_files import decode, flatten

_COLUMNS = ("id", "prompt", "answer", "truth")
_KEY = "answers"
_HEIGHT = 224
"""Of the pictures that are shown, in pixels."""


@dataclass(frozen=True)
class Answered:
    """A record, what the model said to it, and what it should have said, where that is known."""

    record: Record
    answer: str
    truth: str | None

    @property
    def texts(self) -> list[str]:
        """One for each of the table's columns."""
        return [self.record.id, self.record.question, self.answer, self.truth or ""]


def show(answered: Sequence[Answered], loggers: Sequence[Logger], folder: str, step: int) -> None:
    """Shows a table in each logger that can, or writes it to a file where none can.

    Args:
        answered: its rows.
        loggers: of the Trainer.
        folder: of the run.
        step: optimizer steps so far.
    """
    shown, number = False, max(step - 1, 0)  # beside the last step's own loss, counted from 0
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            _in_wandb(answered, logger, number)
            shown = True
        elif isinstance(logger, TensorBoardLogger):
            _in_tensorboard(answered, logger, number)
            shown = True
    if not shown:
        file = Path(folder) / _KEY / f"step-{step}.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([_COLUMNS, *(each.texts for each in answered)])


def _in_wandb(answered: Sequence[Answered], logger: WandbLogger, step: int) -> None:
    import wandb

    rows = [[*each.texts, None if (side := _side_by_side(each)) is None else wandb.Image(side)] for each in answered]
    logger.log_table(_KEY, columns=[*_COLUMNS, "pictures"], data=rows, step=step)


def _in_tensorboard(answered: Sequence[Answered], logger: TensorBoardLogger, step: int) -> None:
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(map(_cell, each.texts) for each in answered)]
    logger.experiment.add_text(_KEY, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)
    for each in answered:
        if (side := _side_by_side(each)) is not None:
            logger.experiment.add_image(f"{_KEY}/{each.record.id}", np.asarray(side), step, dataformats="HWC")


def _cell(text: str) -> str:
    """Text that cannot end a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", "<br>")


def _side_by_side(answered: Answered) -> Any | None:
    """A record's pictures in one row, each as high as the others; None of a record without."""
    from PIL import Image

    pictures = [flatten(decode(file), "RGB") for file in answered.record.images]
    if not pictures:
        return None
    sized = [each.resize((max(1, round(each.width * _HEIGHT / each.height)), _HEIGHT)) for each in pictures]
    row = Image.new("RGB", (sum(each.width for each in sized), _HEIGHT))
    left = 0
    for each in sized:
        row.paste(each, (left, 0))
        left += each.width
    return row
