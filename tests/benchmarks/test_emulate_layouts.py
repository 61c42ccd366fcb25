"""Placements with costs of layouts: what a run writes, and when an aim counts as reached."""

from __future__ import annotations

import json

import pytest

from benchmarks.layout_plans import KINDS, RECOMMENDED, SYNCHRONOUS, UNSHARDED
from benchmarks.layout_report import cells_text
from tests.benchmarks.running import run

MACHINE = dict.fromkeys(("date", "commit", "cpu", "cores", "load", "python", "torch", "lightning"), "1")


def cell(chosen, **seconds):
    named = {UNSHARDED: seconds.pop("unsharded"), SYNCHRONOUS: seconds.pop("synchronous"), **seconds}
    named[RECOMMENDED] = named["uniform"]
    runs = {
        kind: {"step": 2 * each, "stretch": 2.0, "cores": 0.3, "predicted": each, "simulated": each, "plan": kind}
        for kind, each in named.items()
    }
    mix = {"over_uniform": 1.3, "over_synchronous": 1.2}
    return {
        "mix": mix,
        "samples": 8,
        "runs": runs,
        "chosen": {"planner": "uniform", "run": chosen},
        "machine": MACHINE,
    }


def test_an_aim_that_one_cell_reaches_is_reached():
    cells = {
        "small": cell("separate", unsharded=1.36, uniform=1.1, separate=1.0, synchronous=1.5),
        "large": cell("uniform", unsharded=1.1, uniform=1.0, separate=1.2, synchronous=1.4),
    }
    text = cells_text(cells)
    assert "At least 1.35 x uniform, unsharded in one cell: reached, 1.36 (small)" in text
    assert "At least 1.35 x uniform in one cell: missed, 1.10 (small)" in text
    assert "At least 1.7 x batch-synchronous in one cell: missed, 1.50 (small)" in text


def test_a_choice_that_is_late_in_one_cell_misses_its_aim_and_says_where():
    cells = {
        "small": cell("separate", unsharded=1.36, uniform=1.1, separate=1.0, synchronous=1.5),
        "large": cell("uniform", unsharded=1.1, uniform=1.0, separate=1.2, synchronous=1.4),
    }
    text = cells_text(cells)
    assert "The choice of a run by simulated times within 2% of the best in every cell: reached, at most 0.0%" in text
    assert "The choice of `flowtrain plan` within 2% of the best in every cell: missed in small (10.0%)" in text


def test_kinds_of_which_there_is_no_plan_have_a_dash():
    (line,) = (
        line
        for line in cells_text({"small": cell("uniform", unsharded=1.0, uniform=1.0, synchronous=1.5)}).splitlines()
        if line.startswith("| small") and "1.50" in line and ";" in line
    )
    assert [each.strip() for each in line.split("|")][4:7] == ["-", "-", "-"]


@pytest.mark.full
def test_every_kind_of_placement_runs_in_the_layouts_of_its_plan(tmp_path):
    run("emulate_layouts.py", tmp_path, "--ranks", "4", "--mixes", "6B, documents")
    runs = json.loads((tmp_path / "emulate-layouts.json").read_text())["6B, documents; 4 ranks"]["runs"]
    assert set(runs) <= set(KINDS)
    assert {"uniform", "separate", SYNCHRONOUS} <= set(runs)
    for kind, found in runs.items():  # real ranks are never faster than what they sleep for
        assert kind == SYNCHRONOUS or found["step"] / found["stretch"] > 0.97 * found["simulated"]
