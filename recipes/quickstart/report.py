"""What the quickstart learned: losses, unseen drawings, proof that pictures and encoder matter, time, files.

    python -m recipes.quickstart.report [folder of the run]

Everything is computed on two processes under ``strategy="flowtrain"``: there are no training data to plan by, so by the
rule of thumb one encodes, and the other reads features from the pool.
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

from flowtrain_lightning.callbacks.timeline import read_timelines, time_split
from flowtrain_lightning.data import FlowDataModule, ImageProcessor
from recipes.quickstart.check import keywords, prompts, read_records, swapped, write_records
from recipes.quickstart.module import QuickstartVLM
from recipes.quickstart.pictures import Answer, Curve, draw_answers, draw_loss

RECIPE = Path(__file__).parent
RUN = Path("runs/quickstart")
TRAINING_RECORDS = 340  # as many as there are for validation
SHOWN = 6
AVERAGED = 10  # steps of the first and the last training loss


def main() -> None:
    """Look at a finished run and print what there is to see."""
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else RUN
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # devices and roles were said during training
    check = run / "check"
    write_check_files(check)
    model = QuickstartVLM.load_from_checkpoint(run / "checkpoints" / "last.ckpt")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="flowtrain",
        default_root_dir=run,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    losses = {
        name: mean_loss(trainer, model, check / f"{name}.jsonl")
        for name in ("train", "train_swapped", "val", "val_swapped")
    }
    answers = generate(trainer, model, check / "unseen.jsonl")
    if not trainer.is_global_zero:
        return
    training, validation = read_log(run / "metrics.csv")
    shown = one_of_each_kind(answers)
    print_losses(training, validation)
    print_answers(shown, answers)
    print_proofs(losses, encoder_movement(model, run))
    print_time(run)
    draw_loss(training, validation, run / "loss.png")
    draw_answers(shown, run / "drawings.png")
    print_files(run)


@rank_zero_only
def write_check_files(folder: Path) -> None:
    """Write records with their own pictures and with swapped ones, and prompts for the unseen drawings."""
    for name, limit in (("train", TRAINING_RECORDS), ("val", None)):
        records = read_records(RECIPE / "data" / f"{name}.jsonl", limit)
        write_records(folder / f"{name}.jsonl", records)
        write_records(folder / f"{name}_swapped.jsonl", swapped(records))
    write_records(folder / "unseen.jsonl", prompts(read_records(RECIPE / "data" / "val.jsonl")))


def data_module(**files: Any) -> FlowDataModule:
    """The data module of the recipe's configuration, with other files."""
    configured = yaml.safe_load((RECIPE / "config.yaml").read_text())["data"]["init_args"]
    settings: dict[str, Any] = {name: value for name, value in configured.items() if name not in ("train", "val")}
    settings["images"] = ImageProcessor(**settings["images"])
    return FlowDataModule(**settings, **files)


def mean_loss(trainer: L.Trainer, model: QuickstartVLM, file: Path) -> float:
    """The loss per target token of a file's records."""
    return float(trainer.validate(model, datamodule=data_module(val=file), verbose=False)[0]["val_loss"])


def generate(trainer: L.Trainer, model: QuickstartVLM, file: Path) -> list[Answer]:
    """What the model answers to each prompt; nothing on the encoder rank."""
    data = data_module(predict=file)
    answers = []
    for microbatches in trainer.predict(model, datamodule=data) or []:
        for sample, tokens in (pair for microbatch in microbatches for pair in microbatch):
            record = data.record("predict", sample)
            answers.append(Answer(Path(str(record.images[0])), record.turns[1].text, data.tokenizer.decode(tokens)))
    return answers


def one_of_each_kind(answers: list[Answer]) -> list[Answer]:
    """The first drawing of each of the most frequent kinds, that is first keywords, however well it was named."""
    kinds = Counter(keywords(answer.true)[0] for answer in answers).most_common(SHOWN)
    return [next(answer for answer in answers if keywords(answer.true)[0] == kind) for kind, _ in kinds]


def encoder_movement(model: QuickstartVLM, run: Path) -> float:
    """How far training moved the encoder's weights, relative to their norm before it."""
    L.seed_everything(yaml.safe_load((run / "config.yaml").read_text())["seed_everything"], verbose=False)
    initial = QuickstartVLM(**model.hparams)
    initial.configure_model()
    before, after = (
        torch.nn.utils.parameters_to_vector(each.encoder.parameters()).detach() for each in (initial, model)
    )
    return float((after - before).norm() / before.norm())


def read_log(path: Path) -> tuple[Curve, Curve]:
    """The courses of training and validation loss from the CSV logger's file."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return tuple(  # type: ignore[return-value]
        [(int(row["step"]), float(row[name])) for row in rows if row.get(name)] for name in ("train_loss", "val_loss")
    )


def print_losses(training: Curve, validation: Curve) -> None:
    """Print the first and the last losses."""
    losses = [loss for _, loss in training]
    first, last = (sum(part) / len(part) for part in (losses[:AVERAGED], losses[-AVERAGED:]))
    print("Loss per target token      first    last")
    print(f"  training (mean of {AVERAGED:2d})  {first:8.3f}{last:8.3f}")
    print(
        f"  validation             {validation[0][1]:8.3f}{validation[-1][1]:8.3f}  (first at step {validation[0][0]})"
    )


def print_answers(shown: list[Answer], answers: list[Answer]) -> None:
    """Print some unseen drawings, and how many of all were named rightly."""
    print(f"\nDrawings it never saw{'':27}true keywords -> generated keywords")
    for answer in shown:
        print(f"  {answer.picture.stem[:44]:46}{answer.true} -> {answer.generated}")
    right = sum(keywords(answer.generated)[0] in keywords(answer.true) for answer in answers)
    print(f"  The first generated keyword is a true one for {right} of all {len(answers)} unseen drawings.")


def print_proofs(losses: dict[str, float], moved: float) -> None:
    """Print what wrong pictures cost and how far the encoder moved."""
    print("\nDo the pictures matter?  their own  swapped between samples")
    for name, label in (("train", "training"), ("val", "validation")):
        own, other = losses[name], losses[f"{name}_swapped"]
        print(f"  loss, {label:16}{own:10.3f}{other:9.3f}  ({100 * (other / own - 1):+.0f} %)")
    print(f"Does the encoder learn?  Its weights moved by {100 * moved:.0f} % of their initial norm.")


def print_time(run: Path) -> None:
    """Print what the lanes of each role spent their time on."""
    kinds = ("compute", "stall", "communication")
    print("\nTime of each role      " + "".join(f"{kind:>14}" for kind in kinds))
    for role, shares in time_split(read_timelines(run / "timeline")).items():
        print(f"  {role:21}" + "".join(f"{100 * shares.get(kind, 0.0):12.0f} %" for kind in kinds))


def print_files(run: Path) -> None:
    """Print where everything is."""
    print("\nFiles")
    for label, name in (
        ("checkpoints", "checkpoints"),
        ("log", "metrics.csv"),
        ("loss", "loss.png"),
        ("drawings", "drawings.png"),
        ("one step", "timeline.png"),
    ):
        print(f"  {label:21}{run / name}")


if __name__ == "__main__":
    main()
