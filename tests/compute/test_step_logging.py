"""A logged value weighs what it was taken over: nothing, part of a token, some microbatches; in stages, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from flowtrain_lightning.compute.step_logging import StepLogging
from flowtrain_lightning.compute.step_metrics import StepReport
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Done, Job, read_down, run_jobs

STAGES = {"backbone": {"pipeline": 2}}
INTERLEAVED = {"backbone": {"pipeline": 2, "virtual": 2}}


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


def train(folder: Path, layout: str, roles: dict[str, Any], of_weights: bool) -> Done:
    write_steps(folder / "data")
    arguments = {"data": str(folder / "data"), "layout": layout, "roles": roles, "of_weights": of_weights}
    job = Job(layout, "tests.compute.logging_merge:train", ranks_of(layout), arguments)
    return run_jobs(folder, [job])[layout]


def test_what_merge_logs_in_interleaved_stages_counts_once_in_its_microbatch(tmp_path):
    ranks = read_down(train(tmp_path, "1+2", INTERLEAVED, of_weights=False).check().folder)
    (plain,) = read_down(train(tmp_path, "auto", {}, of_weights=False).check().folder)
    assert [float(value) for value in ranks] == pytest.approx([float(plain)] * 3, rel=1e-12)


def test_what_merge_logs_of_weights_on_another_stage_is_refused(tmp_path):
    done = train(tmp_path, "1+2", STAGES, of_weights=True)
    assert any("log('merged', ...) was called in `merge`" in said for said in read_down(done.folder))
