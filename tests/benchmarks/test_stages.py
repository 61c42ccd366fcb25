"""Stages beside the best layout without: plans are of the right kinds, and a run takes what it was simulated to."""

from __future__ import annotations

import json

import pytest

from benchmarks.stages import CELLS, STAGES, WHOLE, farthest, gain, plans_of, text
from flowtrain_lightning.cli.plan_choice import has_stages
from tests.benchmarks.running import run

MACHINE = dict.fromkeys(("date", "commit", "cpu", "cores", "load", "python", "torch", "lightning"), "1")


def test_a_gain_is_told_planned_and_measured():
    seconds = {"planned": 2.0, "simulated": 2.0, "step": 2.1, "runtime": 0.01, "plan": "ranks"}
    cell = {STAGES: seconds, WHOLE: {**seconds, "planned": 3.0, "simulated": 3.2, "step": 3.36}, "machine": MACHINE}
    assert gain(cell, "simulated") == pytest.approx(gain(cell, "step"))
    assert farthest(cell) == pytest.approx(0.12)
    (line,) = (line for line in text({"8 ranks": cell}).splitlines() if line.startswith("| 8 ranks"))
    assert [each.strip() for each in line.split("|")][5:9] == ["x 1.50", "x 1.60", "x 1.60", "12.0%"]


@pytest.mark.full
def test_the_recommended_plan_has_stages_and_the_other_none(tmp_path):
    plans = plans_of(*CELLS[0].question(CELLS[0].records(tmp_path)))
    assert (has_stages(plans[STAGES]), has_stages(plans[WHOLE])) == (True, False)
    assert plans[STAGES].seconds < plans[WHOLE].seconds


@pytest.mark.full
def test_each_plan_takes_what_it_was_simulated_to(tmp_path):
    run("stages.py", tmp_path, "--seconds", "6")
    (found,) = json.loads((tmp_path / "stages.json").read_text()).values()
    for each in (STAGES, WHOLE):
        assert found[each]["step"] == pytest.approx(found[each]["simulated"], rel=0.15)
