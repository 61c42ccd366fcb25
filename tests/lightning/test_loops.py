"""What a Trainer's loops run, and how long: fit, validate, test, predict, and every setting that bounds them."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping

from flowtrain_lightning import FlowDataModule
from tests.lightning.run_context import Recorder, RunContext, flat, half_lengths, numbers
from tests.tiny import TinyVLM

FLOWTRAIN = ("1+1", "1+2")
pytestmark = pytest.mark.timeout(600)


def every_entry_point(context: RunContext) -> None:
    trainer, module, data = context.trainer(max_epochs=1), TinyVLM(), context.data()
    trainer.fit(module, data)
    context.note(trainer, lengths=half_lengths(module))
    context.notes["same"] = _evaluate(trainer, module, data)
    context.notes["new"] = _evaluate(context.trainer(), module, context.data())
    L.seed_everything(7, verbose=False)
    again, fresh = context.trainer(max_epochs=1), TinyVLM()
    again.fit(fresh, context.data())
    context.notes["again"] = [half_lengths(fresh), numbers(again.callback_metrics)]
    again.fit_loop.max_epochs = 2
    again.fit(fresh, context.data())
    context.notes["longer"] = [again.global_step, numbers(again.callback_metrics)]


def _evaluate(trainer: L.Trainer, module: TinyVLM, data: Any) -> dict[str, Any]:
    return {
        "val": numbers(trainer.validate(module, data, verbose=False)[0]),
        "test": numbers(trainer.test(module, data, verbose=False)[0]),
        "predictions": trainer.predict(module, data),
    }


class Worse(L.Callback):
    """A monitored value that never improves."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("worse", float(trainer.current_epoch))


def _stop() -> dict[str, Any]:
    return {"callbacks": [Worse(), EarlyStopping("worse", patience=0, check_on_train_epoch_end=True)]}


SETTINGS: dict[str, dict[str, Any]] = {
    "max_epochs": {"max_epochs": 2},
    "max_steps": {"max_steps": 7, "max_epochs": -1},
    "max_time": {"max_time": {"microseconds": 1}, "max_epochs": 2},
    "min_epochs": {"min_epochs": 4, "max_epochs": 5, "limit_train_batches": 1},
    "min_steps": {"min_steps": 4, "max_epochs": 5, "limit_train_batches": 1},
    "limit_train_batches": {"limit_train_batches": 2, "max_epochs": 2},
    "limit_train_batches of 1.0": {"limit_train_batches": 0.6},
    "limit_val_batches": {"limit_val_batches": 1},
    "limit_val_batches of 1.0": {"limit_val_batches": 0.5},
    "limit_val_batches off": {"limit_val_batches": 0},
    "overfit_batches": {"overfit_batches": 1, "max_epochs": 3},
    "overfit_batches of 1.0": {"overfit_batches": 0.6, "max_epochs": 2},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run of several": {"fast_dev_run": 2},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3, "limit_train_batches": 1},
    "val_check_interval": {"val_check_interval": 2},
    "val_check_interval of 1.0": {"val_check_interval": 0.5},
    "val_check_interval over epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 2},
    "num_sanity_val_steps off": {"num_sanity_val_steps": 0, "limit_train_batches": 1},
    "num_sanity_val_steps all": {"num_sanity_val_steps": -1, "limit_train_batches": 1},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    "barebones": {"barebones": True, "limit_train_batches": 2},
    "what changes no number": {
        "deterministic": True,
        "benchmark": True,
        "detect_anomaly": True,
        "inference_mode": False,
        "use_distributed_sampler": False,
        "enable_progress_bar": True,
        "enable_model_summary": True,
        "profiler": "simple",
        "limit_train_batches": 2,
    },
}
"""Settings of a Trainer that change nothing but what its loops run; all with one epoch unless they say else."""

EARLY = ("min_epochs", "min_steps")


def every_setting(context: RunContext) -> None:
    for name, settings in SETTINGS.items():
        L.seed_everything(7, verbose=False)
        recorder = Recorder()
        more = _stop() if name in EARLY else {"callbacks": []}
        quiet: dict[str, Any] = {"callbacks": [*more["callbacks"], recorder]}
        if name == "barebones":
            quiet = {"callbacks": []}
        trainer = context.trainer(**{"max_epochs": 1, "enable_checkpointing": False, **quiet, **settings})
        module = TinyVLM()
        trainer.fit(module, context.data())
        context.notes[name] = {
            "events": recorder.events,
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "metrics": numbers(trainer.callback_metrics),
            "estimated": None if name in ("max_time", *EARLY) else float(trainer.estimated_stepping_batches),
            "lengths": half_lengths(module),
        }


def every_evaluation_limit(context: RunContext) -> None:
    for number, limit in enumerate((1, 0.5, 2)):
        trainer = context.trainer(limit_test_batches=limit, limit_predict_batches=limit, limit_val_batches=limit)
        module, data = TinyVLM(), context.data(global_batch_size=2)
        context.notes[str(number)] = _evaluate(trainer, module, data)


class Slow(TinyVLM):
    """A backbone that is still at work when the encoder has long ended."""

    def generate(self, batch: Any, features: Any) -> Any:
        time.sleep(0.3)
        return super().generate(batch, features)


class TwoSets(FlowDataModule):
    """Validates on two sets of unequal length."""

    def val_dataloader(self) -> Any:
        return [self.test_dataloader(), super().val_dataloader()]


def several_sets(context: RunContext) -> None:
    for name, frozen in (("trains", False), ("frozen", True)):
        L.seed_everything(7, verbose=False)
        data = context.data(kind=TwoSets, global_batch_size=4)
        trainer = context.trainer(max_epochs=2, val_check_interval=4, enable_checkpointing=False)
        module = Slow(freeze_encoder=frozen)
        trainer.fit(module, data)
        context.notes[name] = {"metrics": numbers(trainer.callback_metrics), "steps": trainer.global_step}
        context.notes[name]["predictions"] = trainer.predict(module, context.data(global_batch_size=2))


LAYOUTS_OF_RUNS = {
    several_sets: ("auto", "1+1"),
    every_entry_point: ("auto", *FLOWTRAIN, "colocated"),
    every_setting: ("auto", "1+1"),
    every_evaluation_limit: ("auto", "1+1"),
}


@pytest.mark.parametrize("layout", [*FLOWTRAIN, "colocated"])
@pytest.mark.parametrize("trainer", ["same", "new"])
def test_validate_test_and_predict_after_fit_give_what_plain_lightning_gives(layout_runs, layout, trainer):
    (plain,) = layout_runs.notes(every_entry_point, "auto")
    ranks = layout_runs.notes(every_entry_point, layout)
    for rank in ranks:
        assert rank[trainer]["val"] == pytest.approx(plain[trainer]["val"], rel=1e-6)
        assert rank[trainer]["test"] == pytest.approx(plain[trainer]["test"], rel=1e-6)
    predicted = [_predicted(rank[trainer]["predictions"]) for rank in ranks]
    assert sorted(flat(predicted)) == sorted(_predicted(plain[trainer]["predictions"]))
    if layout != "colocated":
        assert predicted[-1] == []  # the encoder rank


@pytest.mark.parametrize("layout", [*FLOWTRAIN, "colocated"])
def test_a_second_fit_in_the_same_process_repeats_the_first_and_a_third_goes_on(layout_runs, layout):
    (plain,) = layout_runs.notes(every_entry_point, "auto")
    for rank in layout_runs.notes(every_entry_point, layout):
        assert rank["again"] == [rank["lengths"], rank["metrics"]]
        assert rank["longer"][0] == plain["longer"][0] == 10
        assert rank["longer"][1] == pytest.approx(plain["longer"][1], rel=1e-6)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_the_loops_means_what_it_means_under_plain_lightning(layout_runs, setting):
    plain = layout_runs.notes(every_setting, "auto")[0][setting]
    for rank in layout_runs.notes(every_setting, "1+1"):
        own = rank[setting]
        assert _rounded(own["events"]) == _rounded(plain["events"])
        assert (own["steps"], own["epochs"], own["estimated"]) == (plain["steps"], plain["epochs"], plain["estimated"])
        assert own["metrics"] == pytest.approx(plain["metrics"], rel=1e-6)
        for half, length in own["lengths"].items():
            assert length == pytest.approx(plain["lengths"][half], rel=1e-9)


def test_the_settings_did_what_they_say(layout_runs):
    plain = layout_runs.notes(every_setting, "auto")[0]
    steps = {name: notes["steps"] for name, notes in plain.items()}
    assert steps["max_epochs"] == 10
    assert steps["max_steps"] == 7
    assert steps["max_time"] == 1
    assert steps["min_epochs"] == steps["min_steps"] == 4
    assert steps["fast_dev_run"] == 1
    validations = {name: sum(e == ["val", "fit"] for e in notes["events"]) for name, notes in plain.items()}
    assert validations["val_check_interval"] == 2
    assert validations["val_check_interval of 1.0"] == 2
    assert validations["val_check_interval over epochs"] == 3
    assert validations["check_val_every_n_epoch"] == 1
    assert validations["limit_val_batches off"] == 0


@pytest.mark.parametrize("limit", ["0", "1", "2"])
def test_limits_of_evaluation_mean_what_they_mean_under_plain_lightning(layout_runs, limit):
    plain = layout_runs.notes(every_evaluation_limit, "auto")[0][limit]
    ranks = layout_runs.notes(every_evaluation_limit, "1+1")
    assert [rank[limit]["val"] for rank in ranks] == [pytest.approx(plain["val"], rel=1e-6)] * 2
    assert [rank[limit]["test"] for rank in ranks] == [pytest.approx(plain["test"], rel=1e-6)] * 2
    assert sorted(_predicted(ranks[0][limit]["predictions"])) == sorted(_predicted(plain["predictions"]))


@pytest.mark.parametrize("name", ["trains", "frozen"])
def test_several_validation_sets_are_told_apart(layout_runs, name):
    plain = layout_runs.notes(several_sets, "auto")[0][name]
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= set(plain["metrics"])
    ranks = layout_runs.notes(several_sets, "1+1")
    for rank in ranks:
        assert rank[name]["metrics"] == pytest.approx(plain["metrics"], rel=1e-6)
        assert rank[name]["steps"] == plain["steps"]
    assert sorted(_predicted(ranks[0][name]["predictions"])) == sorted(_predicted(plain["predictions"]))


def _predicted(predictions: list[list[list[Any]]]) -> list[Any]:
    """Steps of microbatches of (sample, tokens) as one list."""
    return flat(flat(predictions))


def _rounded(events: list[list[Any]]) -> list[Any]:
    return [[round(part, 7) if isinstance(part, float) else part for part in event] for event in events]
