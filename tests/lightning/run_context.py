"""What a run of these tests is given: one layout, one folder, the tiny module and its data."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import lightning as L

import flowtrain_lightning as flow
from flowtrain_lightning import FlowDataModule
from tests.tiny import TinyVLM, tiny_data, write_records

DEVICES = {"auto": 1, "one": 1, "1+1": 2, "colocated": 2, "1+2": 3}
"""Each layout with its number of processes: plain Lightning, then flowtrain's (encoder + backbone ranks)."""

RECORDS = {"train": 40, "val": 13, "test": 6, "predict": 6}


class RunContext:
    """One run's surroundings, alike on every layout.

    Attributes:
        layout: a key of ``DEVICES``.
        folder: where this run's Trainers write.
        data_folder: the records.
        notes: what the run wants its tests to know of this rank; JSON types.
    """

    def __init__(self, layout: str, folder: Path, data_folder: Path) -> None:
        self.layout = layout
        self.folder = folder
        self.data_folder = data_folder
        self.notes: dict[str, Any] = {}

    def strategy(self, **settings: Any) -> Any:
        """The layout's strategy."""
        if self.layout == "auto":
            return "auto"
        if self.layout in ("one", "colocated"):
            return flow.FlowTrainStrategy(placement="colocated", **settings)
        return flow.FlowTrainStrategy(encoder_ranks=int(self.layout[0]), **settings)

    def trainer(self, **settings: Any) -> L.Trainer:
        """A quiet Trainer in double precision, in which layouts agree to rounding."""
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        strategy = settings.pop("strategy", None) or self.strategy()
        given = {"precision": "64-true", "default_root_dir": self.folder, **quiet, **settings}
        return L.Trainer(accelerator="cpu", devices=DEVICES[self.layout], strategy=strategy, **given)

    def data(self, kind: type[FlowDataModule] = FlowDataModule, **settings: Any) -> FlowDataModule:
        """Records in steps of 8 samples: 5 steps of training, 2 of validation, several unequal microbatches each."""
        return tiny_data(self.data_folder, kind, **settings)

    def note(self, trainer: L.Trainer, **more: Any) -> None:
        """Notes what a Trainer knows at its end, and ``more``."""
        self.notes |= {
            "metrics": numbers(trainer.callback_metrics),
            "logged": numbers(trainer.logged_metrics),
            "bar": numbers(trainer.progress_bar_metrics),
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "rank": trainer.global_rank,
            **more,
        }


class Recorder(L.Callback):
    """Writes down what happened when.

    Attributes:
        events: ``("train", samples of the step, loss, learning rates)``, ``("val", stage)`` for every validation
            epoch with ``"sanity"`` or ``"fit"``, ``("val_batch",)``.
    """

    def __init__(self) -> None:
        self.events: list[list[Any]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.events.append(["train", batch.plan.samples.tolist(), float(outputs["loss"]), rates])

    def on_validation_start(self, trainer, pl_module):
        self.events.append(["val", "sanity" if trainer.sanity_checking else "fit"])

    def on_validation_batch_end(self, *_):
        self.events.append(["val_batch"])


def flat(lists: Any) -> list[Any]:
    """The members of several lists in one."""
    return [member for one in lists for member in one]


def numbers(metrics: Any) -> dict[str, float]:
    """Metrics as plain numbers."""
    return {name: float(value) for name, value in metrics.items()}


def half_lengths(module: TinyVLM) -> dict[str, float]:
    """The 2-norm of the weights of each half that lives on this rank: equal exactly where the weights are."""
    return {
        half: sum(float(p.detach().double().square().sum()) for p in getattr(module, half).parameters()) ** 0.5
        for half in ("encoder", "backbone")
        if not next(getattr(module, half).parameters()).is_meta
    }


def write_data(folder: Path) -> Path:
    """The records of all stages."""
    for stage, count in RECORDS.items():
        write_records(folder, count, f"{stage}.jsonl", seed=len(stage))
    return folder


def make(folder: Path, layout: str, data_folder: str, runs: list[str]) -> None:
    """Makes runs, each ``module:function``, one after another in the same processes."""
    for run in runs:
        module, _, name = run.partition(":")
        context = RunContext(layout, folder / name, Path(data_folder))
        L.seed_everything(7, verbose=False)
        getattr(importlib.import_module(module), name)(context)
        context.folder.mkdir(parents=True, exist_ok=True)
        (context.folder / f"notes-{os.environ['RANK']}.json").write_text(json.dumps(context.notes))
