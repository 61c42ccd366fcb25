"""Loggers write once, on rank 0, what every rank agreed on."""

from __future__ import annotations

import pytest
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from tests.lightning.run_context import RunContext
from tests.lightning.wandb_file import read_config, read_history
from tests.tiny import TinyVLM

pytestmark = pytest.mark.timeout(600)

NAMES = {"train_loss", "val_loss", "accuracy", "lr-AdamW/pg1", "lr-AdamW/pg2", "epoch"}


def log_to_everything(context: RunContext) -> None:
    loggers = [
        WandbLogger(save_dir=context.folder, project="tests", offline=True),
        TensorBoardLogger(context.folder, name="tensorboard", version=""),
        CSVLogger(context.folder, name="csv", version=""),
    ]
    callbacks = [LearningRateMonitor()]
    trainer = context.trainer(max_epochs=2, logger=loggers, log_every_n_steps=1, callbacks=callbacks)
    trainer.fit(TinyVLM(), context.data())
    context.note(trainer)
    if trainer.is_global_zero:
        loggers[0].experiment.finish()


LAYOUTS_OF_RUNS = {log_to_everything: ("auto", "1+1")}


def test_weights_and_biases_gets_the_values_of_plain_lightning(layout_runs):
    plain, own = _histories(layout_runs, log_to_everything)
    assert len(plain) > 10
    # A callback's and a step's values may share a row or not: names and values per step count.
    assert set().union(*plain) >= NAMES
    for name in NAMES:
        assert [row[name] for row in own if name in row] == pytest.approx([row[name] for row in plain if name in row])


def test_tensorboard_gets_the_values_of_plain_lightning(layout_runs):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = []
    for layout in ("auto", "1+1"):
        layout_runs.notes(log_to_everything, layout)
        folder = layout_runs.folder(log_to_everything, layout) / "tensorboard"
        assert len(list(folder.glob("events.*"))) == 1
        events = event_accumulator.EventAccumulator(str(folder)).Reload()
        found.append({name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]})
    plain, own = found
    assert set(plain) == set(own) >= NAMES
    for name, points in plain.items():
        assert [step for step, _ in own[name]] == [step for step, _ in points]
        assert [value for _, value in own[name]] == pytest.approx([value for _, value in points], rel=1e-5)


def test_hyperparameters_reach_the_loggers(layout_runs):
    layout_runs.notes(log_to_everything, "1+1")
    written = (layout_runs.folder(log_to_everything, "1+1") / "csv" / "hparams.yaml").read_text()
    assert "weight_decay: 0.1" in written


def test_loggers_keep_the_allocation_and_its_reason(layout_runs):
    layout_runs.notes(log_to_everything, "1+1")
    folder = layout_runs.folder(log_to_everything, "1+1")
    config = read_config(folder)
    assert config["allocation"].startswith("separate: encoder on rank 1")
    assert config["allocation_reason"] == "it was asked for"
    for name in ("csv", "tensorboard"):
        kept = yaml.safe_load((folder / name / "hparams.yaml").read_text())
        assert all(kept[key] == config[key] for key in ("allocation", "allocation_reason"))


def test_only_rank_zero_writes(layout_runs):
    layout_runs.notes(log_to_everything, "1+1")
    folder = layout_runs.folder(log_to_everything, "1+1")
    assert len(list(folder.glob("**/metrics.csv"))) == 1
    assert len(list(folder.glob("**/offline-run-*"))) == 1


def _histories(layout_runs, run):
    for layout in ("auto", "1+1"):
        layout_runs.notes(run, layout)
    return [read_history(layout_runs.folder(run, layout)) for layout in ("auto", "1+1")]
