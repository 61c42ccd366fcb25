"""Looks at what the quickstart learned: unseen drawings, swapped images, the same steps in another placement.

    python -m recipes.quickstart.report [folder of the run]

Everything is computed on two processes under ``strategy="flowtrain"``, most of it with one process for each half.
"""

from __future__ import annotations

import csv
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.utilities import rank_zero_only

from flowtrain_lightning import FlowTrainStrategy
from flowtrain_lightning.allocator import Placement
from flowtrain_lightning.allocator.plan_file import read_plan
from flowtrain_lightning.callbacks import TimelineRecorder
from flowtrain_lightning.callbacks.timeline_recorder import draw_steps, read_timelines, time_split
from flowtrain_lightning.data import FlowDataModule, ImageProcessor, IndexConfig
from recipes.quickstart.check import keywords, prompts, read_records, swapped, write_records
from recipes.quickstart.module import QuickstartVLM
from recipes.quickstart.pictures import Answer, Curve, draw_answers, draw_loss
from recipes.quickstart.screen import Findings, PlacementTime, last_screen

RECIPE = Path(__file__).parent
RUN = Path("runs/quickstart")
TRAINING_RECORDS = 340  # as many as there are for validation
SHOWN = 6
REPEATED = 12
"""Steps that run again in the other placement."""

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Settings of a Trainer that leaves nothing behind."""


def main() -> None:
    """Look at a finished run once more."""
    look(Path(sys.argv[1]) if len(sys.argv) > 1 else RUN)


def look(run: Path, seconds: float | None = None) -> None:
    """Look at a finished run, draw its pictures and print the last screen.

    Args:
        run: the folder of its log.
        seconds: how long it took; None is not said.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # devices and roles were said during training
    check = run / "check"
    write_check_files(check)
    configured = configuration(run / "config.yaml")
    model = QuickstartVLM.load_from_checkpoint(run / "checkpoints" / "last.ckpt")
    moved = encoder_movement(model, configured["seed_everything"])
    weights = sum(parameter.numel() for parameter in model.parameters())
    trainer = L.Trainer(devices=2, strategy="flowtrain", default_root_dir=run, **QUIET)
    if trainer.is_global_zero:
        print("\nTrained. Now looking at what was learned ...\n", flush=True)
    losses = {
        name: mean_loss(trainer, model, data_module(configured, val=check / f"{name}.jsonl"))
        for name in ("train", "train_swapped", "val", "val_swapped")
    }
    answers = generate(trainer, model, data_module(configured, predict=check / "unseen.jsonl"))
    chosen = read_plan(run / "allocation.yaml").placement
    other: Placement = "separate" if chosen == "colocated" else "colocated"
    repeated = repeat_first_steps(configured, other, run)
    if not trainer.is_global_zero:
        return
    training, validation = read_log(run / "metrics.csv")
    timelines = {chosen: read_timelines(run / "timeline"), other: read_timelines(run / other / "timeline")}
    shown = one_of_each_kind(answers)
    draw_loss(training, validation, run / "loss.png")
    draw_answers(shown, run / "drawings.png")
    titles = {chosen: f"{chosen}, as the run chose", other: f"{other}, for comparison"}
    draw_steps({titles[placement]: (timeline, None) for placement, timeline in timelines.items()}, run / "step.png")
    found = Findings(
        weights=weights,
        seconds=seconds,
        training=training,
        validation=validation,
        losses=losses,
        moved=moved,
        shown=shown,
        named=sum(is_right(answer) for answer in answers),
        drawings=len(answers),
        placements=[PlacementTime(placement, time_split(timeline)) for placement, timeline in timelines.items()],
        repeated=[(loss, again) for (_, loss), again in zip(training, repeated, strict=False)],
    )
    print(last_screen(found, run))


@rank_zero_only
def write_check_files(folder: Path) -> None:
    """Write records with their own images and with swapped ones, and prompts for the unseen drawings."""
    for name, limit in (("train", TRAINING_RECORDS), ("val", None)):
        records = read_records(RECIPE / "data" / f"{name}.jsonl", limit)
        write_records(folder / f"{name}.jsonl", records)
        write_records(folder / f"{name}_swapped.jsonl", swapped(records))
    write_records(folder / "unseen.jsonl", prompts(read_records(RECIPE / "data" / "val.jsonl")))


def configuration(file: Path = RECIPE / "config.yaml") -> dict[str, Any]:
    """The recipe's configuration, or that which a run has left beside its log."""
    settings: dict[str, Any] = yaml.safe_load(file.read_text())
    return settings


def data_module(configured: dict[str, Any], **files: Any) -> FlowDataModule:
    """The data module of a configuration, or one with the same settings over other files."""
    settings = dict(configured["data"]["init_args"])
    if files:
        settings = {name: value for name, value in settings.items() if name not in ("train", "val")} | files
    for name, section in (("images", ImageProcessor), ("index", IndexConfig)):
        given = settings[name]
        settings[name] = section(**given.get("init_args", given))
    return FlowDataModule(**settings)


def mean_loss(trainer: L.Trainer, model: QuickstartVLM, data: FlowDataModule) -> float:
    """The loss per target token of the validation data."""
    return float(trainer.validate(model, datamodule=data, verbose=False)[0]["val_loss"])


def generate(trainer: L.Trainer, model: QuickstartVLM, data: FlowDataModule) -> list[Answer]:
    """What the model answers to each prompt; nothing on the encoder rank."""
    answers = []
    for microbatches in trainer.predict(model, datamodule=data) or []:
        for sample, tokens in (pair for microbatch in microbatches for pair in microbatch):
            record = data.record("predict", sample)
            answers.append(Answer(Path(str(record.images[0])), record.turns[1].text, data.tokenizer.decode(tokens)))
    return answers


def repeat_first_steps(configured: dict[str, Any], placement: Placement, run: Path) -> list[float]:
    """Train the first steps once more from the same weights in another placement; their losses.

    Their timeline goes to a folder of that name beside the run's log.
    """
    settings = configured["trainer"]
    L.seed_everything(configured["seed_everything"], verbose=False)
    first = _FirstSteps()
    trainer = L.Trainer(
        devices=2,
        strategy=FlowTrainStrategy(placement=placement),
        max_steps=settings["max_steps"],  # by which the learning rate falls; `first` ends it sooner
        gradient_clip_val=settings["gradient_clip_val"],
        limit_val_batches=0,
        callbacks=[first, TimelineRecorder(run / placement)],
        default_root_dir=run,
        **QUIET,
    )
    trainer.fit(QuickstartVLM(**configured["model"]["init_args"]), data_module(configured))
    return first.losses


class _FirstSteps(L.Callback):
    """Ends the training after some steps; keeps their losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        trainer.should_stop = len(self.losses) >= REPEATED


def one_of_each_kind(answers: list[Answer]) -> list[Answer]:
    """The first drawing of each of the most frequent kinds, that is first keywords, however well it was named."""
    kinds = Counter(keywords(answer.true)[0] for answer in answers).most_common(SHOWN)
    return [next(answer for answer in answers if keywords(answer.true)[0] == kind) for kind, _ in kinds]


def is_right(answer: Answer) -> bool:
    """Whether the first keyword that was generated is a true one."""
    return keywords(answer.generated)[0] in keywords(answer.true)


def encoder_movement(model: QuickstartVLM, seed: int) -> float:
    """How far training moved the encoder's weights, relative to their norm before it."""
    L.seed_everything(seed, verbose=False)
    initial = QuickstartVLM(**model.hparams)
    initial.configure_model()
    before, after = (
        torch.nn.utils.parameters_to_vector(each.encoder.parameters()).detach() for each in (initial, model)
    )
    return float((after - before).norm() / before.norm())


def read_log(path: Path) -> tuple[Curve, Curve]:
    """The courses of training and validation loss from the CSV logger's file."""
    with path.open() as file:
        lines = list(csv.DictReader(file))
    return tuple(  # type: ignore[return-value]
        [(int(line["step"]), float(line[name])) for line in lines if line.get(name)]
        for name in ("train_loss", "val_loss")
    )


if __name__ == "__main__":
    main()
