"""`benchmarks/projector.py` runs, at a tiny size, and both ways train to the same losses."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.running import run

pytest.importorskip("transformers")


@pytest.mark.full
def test_a_projector_is_timed_on_either_side(tmp_path):
    run("projector.py", tmp_path)
    (found,) = json.loads((tmp_path / "projector.json").read_text())["steps"]
    assert found["encoder_ms"] > 0 < found["backbone_ms"]
    assert "the projector is the backbone's" in (tmp_path / "projector.md").read_text()
