"""When stages pay: the fastest plans with stages and without are played, and their ratio is told."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.running import run


@pytest.mark.full
def test_both_plans_of_a_cell_are_played(tmp_path):
    said = run("when_stages_pay.py", tmp_path)
    (cell,) = json.loads((tmp_path / "when-stages-pay.json").read_text())["cells"]
    assert "pipeline" in cell["staged"]["plan"]
    assert "pipeline" not in cell["whole"]["plan"]
    assert f"x {cell['whole']['seconds'] / cell['staged']['seconds']:.2f}" in said
