"""Lets the model answer prompts at every validation, scores the answers, and shows them beside pictures and truths."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torchmetrics import Metric

from flowtrain_lightning.data import FlowDataModule, Record, StepBatch, StepLoader
from flowtrain_lightning.data.media.image_files import decode, flatten
from flowtrain_lightning.metrics import AnswerExactMatch, AnswerSimilarity
from flowtrain_lightning.module import FlowModule

_STAGE = "predict"


class EvaluateAnswers(L.Callback):
    """Generates answers to the first records of ``FlowDataModule(predict=...)`` at the end of every validation.

    The last assistant turn of a record is the true answer; a record whose last turn is the user's is shown without one.
    Metrics are logged as ``val_exact_match`` and so on, alike on every rank, so that ``ModelCheckpoint(monitor=...)``
    knows them. Weights & Biases and TensorBoard show a table of pictures, answers and truths; where neither logs, rank
    0 writes it to ``answers/step-<step>.csv`` in the run's folder. Every rank generates its share, on all layouts.

    Args:
        samples: how many records are answered.
        metrics: name -> any metric of torchmetrics that takes answers and truths as two lists of texts, such as
            ``torchmetrics.text.ROUGEScore()``; None takes ``exact_match`` and ``anls``. Metrics that compute several
            values log each.

    Raises:
        ValueError: fewer than 1 sample; or there is no ``predict`` data, or no FlowModule, in ``setup``.
    """

    def __init__(self, samples: int = 32, metrics: Mapping[str, Metric] | None = None) -> None:
        if samples < 1:
            raise ValueError(f"samples is {samples}; it must be at least 1.")
        self.samples = samples
        self.metrics = dict(metrics or {"exact_match": AnswerExactMatch(), "anls": AnswerSimilarity()})
        for metric in self.metrics.values():
            metric.sync_on_compute = False  # every rank scores all answers
        self._loader: StepLoader | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Measures the prompts, once on every node."""
        if stage not in ("fit", "validate"):
            return
        self._loader = None  # of another run
        data = _data(trainer)
        if not isinstance(pl_module, FlowModule) or data is None or _STAGE not in data.files:
            raise ValueError(
                "EvaluateAnswers lets a FlowModule answer the prompts of a FlowDataModule, but there are none. Name "
                "them: FlowDataModule(predict='val.jsonl', ...)."
            )
        if trainer.local_rank == 0:
            data.record(_STAGE, 0)
        trainer.strategy.barrier()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Generates, scores and shows. Every rank takes part."""
        assert isinstance(pl_module, FlowModule)
        if trainer.sanity_checking:
            return
        answered = list(self._answers(trainer, pl_module))
        known = [each for each in answered if each.truth is not None]
        for name, metric in self.metrics.items():
            metric.reset()
            if known:
                metric.update([each.answer for each in known], [each.truth for each in known])
                for what, value in _values(name, metric.compute()):
                    pl_module.log(f"val_{what}", float(value))
        folder = str(trainer.log_dir or trainer.default_root_dir)  # every rank asks for it
        if trainer.is_global_zero:
            show(answered, trainer.loggers, folder, trainer.global_step)

    def _answers(self, trainer: L.Trainer, module: FlowModule) -> Iterator[Answered]:
        """Gathers the answers of all ranks, in the order of the records."""
        data = _data(trainer)
        assert data is not None
        samples, generated = self._generate(trainer, module, data)
        for sample, tokens in zip(samples, generated, strict=True):
            record = data.record(_STAGE, sample)
            yield Answered(record, data.tokenizer.decode(tokens), record.answer)

    def _generate(
        self, trainer: L.Trainer, module: FlowModule, data: FlowDataModule
    ) -> tuple[list[int], list[list[int]]]:
        """Numbers of records, and the new token ids of each; alike on every rank."""
        if self._loader is None:
            self._loader = data.predict_dataloader()
        samples: list[int] = []
        own: dict[int, list[int]] = {}
        for number, batch in enumerate(self._loader):
            samples += batch.plan.samples.tolist()
            own |= self._predict(trainer, batch, number)
            if len(samples) >= self.samples:
                break
        samples = samples[: self.samples]
        table = torch.full((len(samples), 1 + module.max_new_tokens), -1, device=module.device)
        for row, sample in enumerate(samples):
            if sample in own:
                tokens = own[sample][: module.max_new_tokens]
                table[row, 0] = len(tokens)
                table[row, 1 : 1 + len(tokens)] = torch.tensor(tokens, device=module.device)
        told: Any = trainer.strategy.all_gather(table)
        merged = told.reshape(-1, *table.shape).amax(0).tolist()  # -1 on ranks that did not answer it
        return samples, [tokens[:length] for length, *tokens in merged]

    def _predict(self, trainer: L.Trainer, batch: StepBatch, number: int) -> dict[int, list[int]]:
        """Generates this rank's answers of one step: number of a record -> new token ids."""
        batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
        outputs: Any = trainer.strategy.predict_step(batch, number)
        return {int(sample): list(tokens) for microbatch in outputs for sample, tokens in microbatch}


def _data(trainer: L.Trainer) -> FlowDataModule | None:
    data = trainer.datamodule  # type: ignore[attr-defined]
    return data if isinstance(data, FlowDataModule) else None


def _values(name: str, computed: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of each thing that a metric computes."""
    if isinstance(computed, Mapping):
        yield from ((f"{name}_{part}", value) for part, value in computed.items())
    else:
        yield name, computed


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
