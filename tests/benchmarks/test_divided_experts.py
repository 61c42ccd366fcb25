"""Experts divided beside whole ones: plans are of the right kinds, and a run takes what it was simulated to."""

from __future__ import annotations

import json

import pytest

from benchmarks.divided_experts import DIVIDED, WHOLE, ExpertCell, gain, plans_of, text
from flowtrain_lightning.allocator import BACKBONE
from tests.benchmarks.running import run

MACHINE = dict.fromkeys(("date", "commit", "cpu", "cores", "load", "python", "torch", "lightning"), "1")


def test_a_gain_is_told_planned_and_measured():
    seconds = {"planned": 2.0, "simulated": 2.0, "step": 2.1, "runtime": 0.01, "plan": "ranks"}
    cell = {DIVIDED: seconds, WHOLE: {**seconds, "planned": 3.0, "simulated": 3.2, "step": 3.36}, "machine": MACHINE}
    assert gain(cell, "simulated") == pytest.approx(gain(cell, "step"))
    (line,) = (line for line in text({"8 ranks": cell}).splitlines() if line.startswith("| 8 ranks"))
    assert [each.strip() for each in line.split("|")][5:9] == ["x 1.50", "x 1.60", "x 1.60", "+6.7%"]


@pytest.mark.full
def test_the_recommended_plan_divides_experts_and_the_other_does_not(tmp_path):
    cell = ExpertCell(8, 1.0)
    plans = plans_of(*cell.question(cell.records(tmp_path)))
    degrees = {name: plan.chosen[BACKBONE].layout.expert for name, plan in plans.items()}
    assert (degrees[DIVIDED] > 1, degrees[WHOLE]) == (True, 1)


@pytest.mark.full
def test_each_plan_takes_what_it_was_simulated_to(tmp_path):
    run("divided_experts.py", tmp_path, "--seconds", "6")
    (found,) = json.loads((tmp_path / "divided-experts.json").read_text()).values()
    for each in (DIVIDED, WHOLE):
        assert found[each]["step"] == pytest.approx(found[each]["simulated"], rel=0.15)


@pytest.mark.full
def test_layers_of_both_kinds_are_run_in_turns(tmp_path):
    told = run("expert_layers.py", tmp_path)
    assert "8 experts of 32 x 32, 16 tokens a rank" in told
