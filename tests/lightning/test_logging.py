"""Logged values: the same names and numbers as under plain Lightning, on every rank."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from flowtrain_lightning.data import IGNORED_LABEL
from tests.lightning.run_context import RunContext, numbers
from tests.tiny import TinyVLM

FLOWTRAIN = ("1+1", "colocated", "1+2")
pytestmark = pytest.mark.timeout(600)


class Chatty(TinyVLM):
    """Logs in every place where a user may, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[dict[str, float]] = []

    def loss(self, outputs, batch):
        # Means over target tokens, so that they don't depend on which sequences share a microbatch.
        loss, tokens = super().loss(outputs, batch)
        chosen = batch.labels != IGNORED_LABEL
        self.log("both", loss / tokens, on_step=True, on_epoch=True, prog_bar=True)
        self.log("epoch_only", outputs[chosen].mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        self.log("unseen", 1.0, logger=False)
        self.log("by_stage", 1.0, on_step=self.training, on_epoch=not self.training)
        means = {"label": batch.labels[chosen].double().mean(), "place": batch.position_ids[chosen].double().mean()}
        self.log_dict(means, on_step=True, on_epoch=True)
        return loss, tokens

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("per_step", 2.0 * batch_idx, on_step=True, on_epoch=True)
        self.log("largest", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")
        self.log_dict({"square": float(batch_idx) ** 2, "shift": batch_idx - 1.0}, on_step=True, on_epoch=True)

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.log_dict({"val_square": float(batch_idx) ** 2})

    def on_train_epoch_end(self):
        self.log("epoch_end", float(self.trainer.current_epoch), sync_dist=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.log("val_score", float(self.trainer.callback_metrics["val_loss"]) ** 2)
        self.log("val_synced", 3.0, sync_dist=True, reduce_fx="sum" if self.trainer.world_size == 1 else "mean")
        self.log("rank_zero_note", 1.0, rank_zero_only=True)

    def on_validation_end(self):
        self.heard.append(numbers(self.trainer.callback_metrics))


def log_everywhere(context: RunContext) -> None:
    logger = CSVLogger(context.folder, name="csv", version="")
    trainer = context.trainer(max_epochs=2, val_check_interval=2, log_every_n_steps=2, logger=logger)
    module = Chatty()
    trainer.fit(module, context.data())
    context.note(trainer, heard=module.heard)


LAYOUTS_OF_RUNS = {log_everywhere: ("auto", *FLOWTRAIN)}


@pytest.mark.parametrize("layout", FLOWTRAIN)
def test_every_rank_hears_the_numbers_that_plain_lightning_gives(layout_runs, layout):
    (plain,) = layout_runs.notes(log_everywhere, "auto")
    assert {"train_loss", "val_loss", "both_step", "both_epoch", "epoch_only", "unseen", "per_step_epoch"} <= set(
        plain["metrics"]
    )
    for rank in layout_runs.notes(log_everywhere, layout):
        assert rank["metrics"] == pytest.approx(plain["metrics"], rel=1e-6)


@pytest.mark.parametrize("layout", ["auto", *FLOWTRAIN])
def test_steps_of_which_a_hook_logs_several_values_weigh_alike_over_an_epoch(layout_runs, layout):
    for rank in layout_runs.notes(log_everywhere, layout):
        steps = rank["steps"] // 2  # of each of two epochs
        of_epoch = {"square_epoch": sum(n**2 for n in range(steps)) / steps, "shift_epoch": (steps - 1) / 2 - 1}
        assert {name: rank["metrics"][name] for name in of_epoch} == pytest.approx(of_epoch)
        assert rank["metrics"]["val_square"] == 0.5  # of two steps


@pytest.mark.parametrize("layout", FLOWTRAIN)
def test_callbacks_see_every_validation_alike(layout_runs, layout):
    (plain,) = layout_runs.notes(log_everywhere, "auto")
    assert len(plain["heard"]) == 5  # the sanity check, then twice in each of two epochs
    for rank in layout_runs.notes(log_everywhere, layout):
        assert [h["val_loss"] for h in rank["heard"]] == pytest.approx([h["val_loss"] for h in plain["heard"]])
        assert [h["val_score"] for h in rank["heard"]] == pytest.approx([h["val_score"] for h in plain["heard"]])


@pytest.mark.parametrize("layout", FLOWTRAIN)
def test_the_progress_bar_shows_what_it_shows_under_plain_lightning(layout_runs, layout):
    (plain,) = layout_runs.notes(log_everywhere, "auto")
    assert set(plain["bar"]) >= {"train_loss", "val_loss", "both_step", "both_epoch", "epoch_end"}
    assert layout_runs.notes(log_everywhere, layout)[0]["bar"] == pytest.approx(plain["bar"], rel=1e-6)


@pytest.mark.parametrize("layout", FLOWTRAIN)
def test_the_csv_file_is_the_one_that_plain_lightning_writes(layout_runs, layout):
    plain = _rows(layout_runs.folder(log_everywhere, "auto"))
    layout_runs.notes(log_everywhere, layout)
    rows = _rows(layout_runs.folder(log_everywhere, layout))
    assert len(rows) == len(plain) > 8
    for row, expected in zip(rows, plain, strict=True):
        assert row == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("layout", ["auto", *FLOWTRAIN])
def test_a_name_may_be_logged_otherwise_in_validation_than_in_training(layout_runs, layout):
    layout_runs.notes(log_everywhere, layout)
    rows = _rows(layout_runs.folder(log_everywhere, layout))
    assert any("train_loss" in row for row in rows)
    assert any("val_loss" in row for row in rows)
    assert all("by_stage" in row for row in rows if "train_loss" in row or "val_loss" in row)


def _rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "csv" / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
