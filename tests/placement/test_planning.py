"""Planning from measured costs."""

from __future__ import annotations

from dataclasses import replace

from flowtrain_lightning.placement.planning import Planner
from flowtrain_lightning.placement.prediction import Processors
from flowtrain_lightning.placement.steps import training_steps
from tests.placement.profiles import make_profile
from tests.tiny import tiny_data, write_records


def placements(choice):
    return {each.allocation.placement for each in choice.predictions}


def test_halves_that_did_not_fit_together_are_not_planned_on_the_same_ranks(tmp_path):
    write_records(tmp_path, 32)
    planner = Planner(training_steps(tiny_data(tmp_path)), 2, Processors(((0,), (1,)), 1.0), 4)
    profile = make_profile(0.01, 0.01)
    assert placements(planner.choose(profile)) == {"colocated", "separate"}
    choice = planner.choose(replace(profile, whole=False))
    assert placements(choice) == {"separate"}
    assert "fastest of all that the steps and the devices allow" in choice.why
