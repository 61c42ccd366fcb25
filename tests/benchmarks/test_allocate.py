"""`benchmarks/allocate.py` runs in both modes, at a tiny size, and sets predictions beside measurements."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.running import run


@pytest.mark.full
def test_every_split_of_emulated_ranks_has_a_prediction_and_a_measurement(tmp_path):
    printed = run("allocate.py", tmp_path, "--emulate", "2")
    (costs,) = json.loads((tmp_path / "allocate-2.json").read_text())["costs"].values()
    assert set(costs["predicted"]) == set(costs["measured"]) == {"colocated", "1 + 1", "mixed 1 + 1"}
    assert costs["chosen"] in costs["measured"]
    for split, predicted in costs["predicted"].items():
        assert costs["measured"][split] > 0.9 * predicted, "nothing is faster than what its computing takes"
    assert "the chosen one is behind by" in printed


@pytest.mark.full
def test_both_placements_of_a_module_have_a_prediction_and_a_measurement(tmp_path):
    printed = run("allocate.py", tmp_path)
    found = json.loads((tmp_path / "allocate.json").read_text())["modules"]["tiny"]
    assert set(found["measured"]) == {"separate", "colocated"}
    assert set(found["measured"]) < set(found["predicted"])
    assert set(found["measured"]) == set(found["planned"])
    assert "the choice was" in printed
