"""Lightning's built-in callbacks, on every rank."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger

from tests.lightning.run_context import Recorder, RunContext, flat, half_lengths, numbers
from tests.tiny import TinyVLM

pytestmark = pytest.mark.timeout(600)


def keep_the_best(context: RunContext) -> None:
    # Losses fall, so with "max" the best two are not the last two.
    names = {"filename": "{epoch}-{val_loss:.4f}"}
    best = ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=2, save_last=True, **names)
    often = ModelCheckpoint(context.folder / "often", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    timed = ModelCheckpoint(context.folder / "timed", train_time_interval=timedelta(seconds=0), save_weights_only=True)
    trainer = context.trainer(max_epochs=4, callbacks=[best, often, timed])
    module = TinyVLM()
    trainer.fit(module, context.data())
    context.note(
        trainer,
        best=Path(best.best_model_path).name,
        score=float(best.best_model_score),
        kept=sorted(path.name for path in Path(best.dirpath).iterdir()),
        often=sorted(path.name for path in (context.folder / "often").iterdir()),
        timed=len(list((context.folder / "timed").iterdir())),
    )
    context.notes["of_best"] = numbers(trainer.validate(module, context.data(), ckpt_path="best", verbose=False)[0])
    context.notes["of_last"] = numbers(trainer.validate(module, context.data(), ckpt_path="last", verbose=False)[0])


def stop_early(context: RunContext) -> None:
    recorder = Recorder()
    stopping = EarlyStopping(monitor="val_loss", mode="max", patience=1)
    trainer = context.trainer(max_epochs=9, callbacks=[stopping, recorder], enable_checkpointing=False)
    trainer.fit(TinyVLM(), context.data())
    context.note(trainer, stopped=stopping.stopped_epoch, best=float(stopping.best_score))


def watch_everything(context: RunContext) -> None:
    called: list[str] = []
    lambdas = LambdaCallback(
        on_train_batch_end=lambda *_: called.append("train"), on_validation_epoch_end=lambda *_: called.append("val")
    )
    timer, spikes, bar = Timer(duration={"hours": 1}), SpikeDetection(warmup=1, rtol=1e6, atol=1e6), TQDMProgressBar()
    module = TinyVLM(lr=1e-3)
    callbacks = [
        lambdas,
        timer,
        spikes,
        bar,
        RichModelSummary(max_depth=2),
        LearningRateMonitor(logging_interval="step", log_momentum=True, log_weight_decay=True),
        DeviceStatsMonitor(cpu_stats=True),
        ThroughputMonitor(batch_size_fn=lambda batch: len(batch.plan.samples), window_size=3),
        ModelSummary(max_depth=-1),
    ]
    logger = CSVLogger(context.folder, name="csv", version="")
    trainer = context.trainer(
        max_epochs=2, callbacks=callbacks, logger=logger, log_every_n_steps=1, enable_progress_bar=True
    )
    trainer.fit(module, context.data())
    context.note(trainer, called=called, seconds=timer.time_elapsed("train"), spikes=spikes.bad_batches)
    context.notes["bar"] = [bar.total_train_batches, bar.is_enabled]
    context.notes["columns"] = sorted(logger.experiment.metrics_keys) if trainer.is_global_zero else []
    rich = context.trainer(max_epochs=1, callbacks=[RichProgressBar()], enable_progress_bar=True, logger=False)
    rich.fit(TinyVLM(), context.data())
    context.notes["rich"] = rich.global_step


def summarize(context: RunContext) -> None:
    from lightning.pytorch.utilities.model_summary import summarize as summary_of

    module = TinyVLM(freeze_encoder=True)
    trainer = context.trainer(max_steps=1, limit_val_batches=0, enable_checkpointing=False)

    class Look(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            found = summary_of(pl_module)
            context.notes["parameters"] = dict(zip(found.layer_names, found.param_nums, strict=True))
            context.notes["trainable"] = found.trainable_parameters
            context.notes["total"] = found.total_parameters

    trainer.callbacks.append(Look())
    trainer.fit(module, context.data())


class Writer(BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append(prediction)

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs.append(predictions)


def write_predictions(context: RunContext) -> None:
    writer = Writer()
    trainer = context.trainer(callbacks=[writer])
    returned = trainer.predict(TinyVLM(), context.data(global_batch_size=2), return_predictions=False)
    context.notes |= {"batches": writer.batches, "epochs": writer.epochs, "returned": returned}


class Thawing(TinyVLM):
    """An encoder that begins to train in the course of the run."""

    def __init__(self, epoch: int = 0, batch: int = 0) -> None:
        super().__init__(freeze_encoder=True)
        self.thaws = (epoch, batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == self.thaws:
            self.encoder.requires_grad_(True)


class Skipping(TinyVLM):
    """Leaves the first epoch after two steps, while a frozen encoder has worked ahead."""

    def __init__(self) -> None:
        super().__init__(freeze_encoder=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None


LATE = {"thaw at an epoch": (1, 0), "thaw inside an epoch": (0, 2)}


def change_course(context: RunContext) -> None:
    for name, module in {**{name: Thawing(*when) for name, when in LATE.items()}, "skip": Skipping()}.items():
        L.seed_everything(7, verbose=False)
        recorder = Recorder()
        trainer = context.trainer(max_epochs=2, callbacks=[recorder], enable_checkpointing=False)
        trainer.fit(module, context.data())
        losses = [event[2] for event in recorder.events if event[0] == "train"]
        context.notes[name] = {"lengths": half_lengths(module), "losses": losses, "steps": trainer.global_step}


LAYOUTS_OF_RUNS = {
    keep_the_best: ("auto", "1+1", "1+2"),
    stop_early: ("auto", "1+1"),
    watch_everything: ("auto", "1+1"),
    summarize: ("auto", "1+1"),
    write_predictions: ("auto", "1+1"),
    change_course: ("auto", "1+1"),
}


@pytest.mark.parametrize("layout", ["1+1", "1+2"])
def test_model_checkpoint_keeps_the_best_and_the_last_as_under_plain_lightning(layout_runs, layout):
    (plain,) = layout_runs.notes(keep_the_best, "auto")
    ranks = layout_runs.notes(keep_the_best, layout)
    for rank in ranks:
        assert rank["best"] == plain["best"]
        assert rank["score"] == pytest.approx(plain["score"], rel=1e-6)
        assert rank["of_best"] == pytest.approx(plain["of_best"], rel=1e-6)
        assert rank["of_last"] == pytest.approx(plain["of_last"], rel=1e-6)
    assert ranks[0]["kept"] == plain["kept"]
    assert len(plain["kept"]) == 3
    assert ranks[0]["often"] == plain["often"]
    assert len(plain["often"]) == 5
    assert ranks[0]["timed"] == plain["timed"] == 1
    assert not plain["best"].startswith("epoch=3")
    assert plain["of_best"]["val_loss"] == pytest.approx(plain["score"], rel=1e-6)


def test_early_stopping_stops_every_rank_after_the_same_epoch(layout_runs):
    (plain,) = layout_runs.notes(stop_early, "auto")
    for rank in layout_runs.notes(stop_early, "1+1"):
        assert (rank["stopped"], rank["epochs"], rank["steps"]) == (plain["stopped"], plain["epochs"], plain["steps"])
        assert rank["best"] == pytest.approx(plain["best"], rel=1e-6)
    assert plain["stopped"] > 0


def test_monitors_progress_bars_and_summaries_run_on_every_rank(layout_runs):
    (plain,) = layout_runs.notes(watch_everything, "auto")
    ranks = layout_runs.notes(watch_everything, "1+1")
    for rank in ranks:
        assert rank["called"] == plain["called"]
        assert rank["seconds"] > 0
        assert rank["spikes"] == []
        assert rank["rich"] == 5
    assert ranks[0]["bar"] == plain["bar"]
    assert set(ranks[0]["columns"]) >= set(plain["columns"])
    assert {"lr-AdamW/pg1", "lr-AdamW/pg2", "train/device/samples_per_sec"} <= set(plain["columns"])


def test_a_summary_counts_the_parameters_of_both_halves_on_every_rank(layout_runs):
    (plain,) = layout_runs.notes(summarize, "auto")
    assert plain["total"] == sum(plain["parameters"].values())
    for rank in layout_runs.notes(summarize, "1+1"):
        assert rank == plain


def test_a_prediction_writer_gets_what_its_rank_predicted(layout_runs):
    (plain,) = layout_runs.notes(write_predictions, "auto")
    backbone, encoder = layout_runs.notes(write_predictions, "1+1")
    assert backbone["epochs"] == [backbone["batches"]]
    assert backbone["returned"] is None
    assert [sorted(flat(step)) for step in backbone["batches"]] == [sorted(flat(step)) for step in plain["batches"]]
    assert encoder["batches"] == [[] for _ in plain["batches"]]


@pytest.mark.parametrize("name", LATE)
def test_an_encoder_may_begin_to_train_in_the_course_of_the_run(layout_runs, name):
    plain = layout_runs.notes(change_course, "auto")[0][name]
    for rank in layout_runs.notes(change_course, "1+1"):
        assert rank[name]["losses"] == pytest.approx(plain["losses"], rel=1e-9)
        for half, length in rank[name]["lengths"].items():
            assert length == pytest.approx(plain["lengths"][half], rel=1e-9)


def test_what_an_encoder_prepared_for_skipped_steps_is_not_taken_for_later_ones(layout_runs):
    plain = layout_runs.notes(change_course, "auto")[0]["skip"]
    for rank in layout_runs.notes(change_course, "1+1"):
        assert rank["skip"]["steps"] == plain["steps"] == 7
        assert rank["skip"]["losses"] == pytest.approx(plain["losses"], rel=1e-9)
