"""Copies of a module that trains, as averages of weights and teachers of one's own need them."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch

from tests.forks import Job, run_jobs
from tests.lightning.run_context import RunContext, half_lengths
from tests.tiny import TinyVLM

pytestmark = pytest.mark.timeout(600)


class Averaging(L.Callback):
    """Averages weights into a copy of the module, made when the run begins."""

    average: TinyVLM

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.average = copy.deepcopy(pl_module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for average, weight in zip(self.average.parameters(), pl_module.parameters(), strict=True):
            average.mul_(0.9).add_(weight, alpha=0.1)


def average_into_a_copy(context: RunContext) -> None:
    averaging, module = Averaging(), TinyVLM()
    trainer = context.trainer(max_epochs=1, enable_checkpointing=False, callbacks=[averaging])
    trainer.fit(module, context.data())
    context.notes |= {"average": half_lengths(averaging.average), "weights": half_lengths(module)}


LAYOUTS_OF_RUNS = {average_into_a_copy: ("auto", "1+1")}


def test_each_rank_may_average_its_half_into_a_copy_of_the_module(layout_runs):
    (plain,) = layout_runs.notes(average_into_a_copy, "auto")
    ranks = layout_runs.notes(average_into_a_copy, "1+1")
    assert {**ranks[0]["average"], **ranks[1]["average"]} == pytest.approx(plain["average"], rel=1e-9)
    assert plain["average"] != plain["weights"]


def test_a_teacher_that_checkpoints_would_lack_is_refused_in_the_first_step(tmp_path, data_folder):
    arguments = {"kind": "LateTeacher", "data_folder": str(data_folder)}
    done = run_jobs(tmp_path, [Job("run", "tests.lightning.wrong_hooks:train", 2, arguments, deadline=100)])["run"]
    assert 1 in done.codes
    assert "The parameter 'teacher.embed.weight' was added after the halves were built" in done.log
    assert "Build it where its half is built, as in `configure_encoder`" in done.log
