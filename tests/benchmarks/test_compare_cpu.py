"""`benchmarks/compare_cpu.py` runs at a tiny size, and says all that it promises."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.running import run


@pytest.mark.full
@pytest.mark.timeout(700)  # two runs one after the other, on a machine that may be busy
def test_both_checkouts_are_measured_in_turns(tmp_path):
    printed = run("compare_cpu.py", tmp_path, "--ranks", "2", "--steps", "4", deadline=600)
    results = json.loads((tmp_path / "compare-cpu.json").read_text())
    assert "x base" in printed
    assert set(results["runs"]) == {"this checkout", "base"}
    for (figures,) in results["runs"].values():
        assert 0 <= figures["user_seconds"] + figures["system_seconds"] < 1
        assert 1e-4 < figures["aside_seconds"] < 1
