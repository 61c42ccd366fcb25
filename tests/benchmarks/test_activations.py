"""Hidden states from stage to stage: both ways are measured at every size and direction, in turns."""

from __future__ import annotations

import json
from itertools import product

from benchmarks.activations import BOTH, GROUP, MESSAGES, ONE, POOL
from tests.benchmarks.running import run


def test_the_pool_and_a_group_pass_the_same_in_turns(tmp_path):
    said = run("activations.py", tmp_path, deadline=120)
    runs = json.loads((tmp_path / "activations.json").read_text())["runs"]
    found = [(each["bytes"], each["direction"], each["way"]) for each in runs]
    assert found == list(product(MESSAGES, (ONE, BOTH), (POOL, GROUP)))
    assert all(each["s"] > 0 and each["cpu"] > 0 for each in runs)
    assert "| 64 MiB, both ways |" in said
