"""Over an epoch a logged value weighs what it was taken over: nothing, part of a token, or some microbatches."""

from __future__ import annotations

import lightning as L

from flowtrain_lightning.compute.step_logging import StepLogging
from flowtrain_lightning.compute.step_metrics import StepReport


def logged_of(report: StepReport, monkeypatch) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}

    def log(_, name, value, **options):
        found[name] = (float(value), options["batch_size"])

    monkeypatch.setattr(L.LightningModule, "log", log)
    StepLogging().log_report("val", report)
    return found


def test_a_loss_weighs_its_tokens_and_a_value_those_of_where_it_was_logged(monkeypatch):
    report = StepReport(2.0, 8.0, False, {"accuracy": 0.5}, weights={"accuracy": 3.0})
    assert logged_of(report, monkeypatch) == {"val_loss": (2.0, 8), "accuracy": (0.5, 3)}


def test_a_loss_of_weighed_targets_weighs_their_sum(monkeypatch):
    assert logged_of(StepReport(2.0, 0.25, False), monkeypatch) == {"val_loss": (2.0, 0.25)}


def test_a_step_without_targets_counts_for_nothing(monkeypatch):
    assert logged_of(StepReport(0.0, 0.0, False), monkeypatch) == {}
