"""Few long samples a step: what is compared, and that the table puts each beside what it was simulated to take."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.long_cells import CONTENDERS, OURS, REPEATED, SLICED, LongCell, SharedTower
from benchmarks.long_samples import text
from flowtrain_lightning.packing.step_work import PassTimes
from tests.benchmarks.running import run

MACHINE = dict.fromkeys(("date", "commit", "cpu", "cores", "load", "python", "torch", "lightning"), "1")


class OfTokens:
    encoder_trains = True

    def batch(self, role, lengths):
        return PassTimes(float(lengths.sum()), 0.0)


def test_ranks_that_repeat_a_tower_take_as_long_as_all_of_their_group():
    costs, lengths = SharedTower(OfTokens(), group=4), np.array([3, 5])
    assert costs.batch("encoder", lengths).forward == 32
    assert costs.batch("backbone", lengths).forward == 8


def test_a_plan_that_deals_the_tower_is_faster_than_one_that_repeats_it(tmp_path):
    cell = LongCell("qwen2.5-vl-3b", 8192, 4, frozen=False)
    found = cell.question(cell.records(tmp_path)).contenders()
    assert set(found) == set(CONTENDERS)
    assert found[OURS].plan.seconds == pytest.approx(found[OURS].simulated)
    assert found[OURS].simulated < found[SLICED].simulated < found[REPEATED].simulated


def test_what_was_only_simulated_is_not_among_the_runs():
    simulated = {each: {"plan": "ranks", "ideal": 2.0, "planned": 2.0} for each in CONTENDERS}
    measured = {
        each: {**found, "step": 2.1, "own": 2.0, "runtime": 0.01, "machine": MACHINE}
        for each, found in simulated.items()
    }
    told = text({"short": simulated, "long": measured})
    (line,) = (line for line in told.splitlines() if line.startswith("| long") and "+5.0%" in line)
    assert "| short" in told
    assert "x 1.00" in line
    assert not any(line.startswith("| short") and "%" in line for line in told.splitlines())


@pytest.mark.full
def test_each_contender_takes_what_it_was_simulated_to(tmp_path):
    run("long_samples.py", tmp_path, "--seconds", "4")
    (found,) = json.loads((tmp_path / "long-samples.json").read_text()).values()
    for each in CONTENDERS:
        assert found[each]["step"] == pytest.approx(found[each]["own"], rel=0.1)
