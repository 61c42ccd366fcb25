"""`benchmarks/waiting.py` runs, at a tiny size, and no step but the first has to be waited for."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.running import run


@pytest.mark.full
def test_steps_are_ready_when_the_training_loop_asks_for_them(tmp_path):
    run("waiting.py", tmp_path)
    runs = json.loads((tmp_path / "waiting.json").read_text())["runs"]
    assert len(runs) == 2 * 2 * 2
    assert "| tokens " in (tmp_path / "waiting.md").read_text()
    # The machine may be busy: half of the waits, in most of the runs, are over at once.
    assert sum(run["median_ms"] < 5 for run in runs) >= 6
