"""A plan is looked at again where times have drifted from it, and a better one is told once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flowtrain_lightning.allocator import choose_placement, default_allocation
from flowtrain_lightning.allocator.plan_file import read_plan
from flowtrain_lightning.callbacks import FlowReplan
from flowtrain_lightning.placement.choose_allocation import PlacementDecision
from flowtrain_lightning.placement.measured import MeasuredCosts, Processors
from flowtrain_lightning.placement.run_costs import first_steps
from tests.placement.profiles import make_profile
from tests.tiny import tiny_data, write_records

STEPS = 4
APART = Processors(((0, 1),), 2.0)
ASKED = PlacementDecision(default_allocation(2), "it was asked for")


@pytest.fixture(scope="module")
def decision(tmp_path_factory):
    """Planned where the encoder takes a second for 100 patches and the backbone one for 100 tokens."""
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 40)
    profile = make_profile(0.01, 0.01, optimizer=100.0)  # optimizers are dear, so separate ranks win
    costs = MeasuredCosts(profile, first_steps(tiny_data(folder)), 2, APART, 4)
    choice = choose_placement(costs)
    assert choice.chosen.name == "separate 1 + 1"
    return PlacementDecision(choice.chosen.allocation, choice.reason, costs, choice)


class Run:
    """A run on two CPU ranks, of which nothing is there but what the callback asks for."""

    def __init__(self, folder, decision, callback):
        self.runner = SimpleNamespace(collects_timings=False, report=SimpleNamespace(notes=()))
        strategy = SimpleNamespace(runner=self.runner, placement_decision=decision)
        self.trainer = SimpleNamespace(strategy=strategy, log_dir=str(folder), default_root_dir=str(folder))
        self.callback = callback
        callback.on_train_start(self.trainer, None)

    def step(self, encoder, backbone, steps=1):
        """Steps in which 100 patches and 100 tokens took so long."""
        for number in range(steps):
            microbatches = [[60.0, 0.0, 0.6 * backbone], [40.0, 0.0, 0.4 * backbone]]
            timings = {"encoder": [[100.0, 0.0, encoder]], "backbone": microbatches}
            self.runner.report = SimpleNamespace(notes=({"timings": timings},))
            self.callback.on_train_batch_end(self.trainer, None, None, None, number)


@pytest.fixture
def run(decision, tmp_path):
    return Run(tmp_path, decision, FlowReplan(steps=STEPS))


def test_times_as_planned_say_nothing(run, recwarn):
    run.step(1.1, 0.9, steps=5 * STEPS)
    assert run.runner.collects_timings
    assert not recwarn.list


def test_a_drift_under_which_the_plan_stays_the_best_says_nothing(run, recwarn):
    run.step(1.5, 1.5, steps=2 * STEPS)
    assert not recwarn.list


def test_the_better_plan_is_told_once_and_kept_as_a_file(run, tmp_path):
    with pytest.warns(UserWarning, match="no longer fits") as warned:
        run.step(1000.0, 1.0, steps=3 * STEPS)
    (warning,) = warned
    said = str(warning.message)
    assert "the backbone takes 1.00 times and the encoder takes 1000.00 times as long as it was planned with" in said
    assert "colocated x2 is predicted to be" in said
    assert "> colocated x2" in said
    assert f"FlowTrainStrategy(allocation='{tmp_path / 'better_allocation.yaml'}')" in said
    assert read_plan(tmp_path / "better_allocation.yaml").placement == "colocated"


def test_some_slow_steps_are_no_drift(run, recwarn):
    for _ in range(5):
        run.step(1000.0, 1.0)
        run.step(1.0, 1.0, steps=STEPS - 1)
    assert not recwarn.list


def test_with_another_trainer_the_callback_begins_anew(run, recwarn):
    run.step(encoder=1.0, backbone=5.0, steps=STEPS - 1)
    run.callback.on_train_start(run.trainer, None)
    run.step(encoder=1.0, backbone=1.0, steps=STEPS)
    assert not recwarn


def test_without_a_plan_there_is_nothing_to_compare_with(tmp_path, recwarn):
    run = Run(tmp_path, ASKED, FlowReplan(steps=1))
    run.step(1000.0, 1.0, steps=3)
    assert not recwarn.list


def test_plain_lightning_has_no_plan():
    trainer = SimpleNamespace(strategy=SimpleNamespace())
    callback = FlowReplan()
    callback.on_train_start(trainer, None)
    callback.on_train_batch_end(trainer, None, None, None, 0)


@pytest.mark.parametrize("settings", [{"threshold": 0.0}, {"steps": 0}])
def test_settings_that_compare_nothing_are_refused(settings):
    with pytest.raises(ValueError, match="must be above 0, and steps at least 1"):
        FlowReplan(**settings)
