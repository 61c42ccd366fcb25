"""`benchmarks/see_once.py` runs, at a tiny size: sharing takes fewer FLOPs, and keeping gives the same losses."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.running import run


@pytest.mark.full
def test_encoding_a_picture_once_is_timed_beside_encoding_it_each_time(tmp_path):
    run("see_once.py", tmp_path)
    found = json.loads((tmp_path / "see-once.json").read_text())
    assert found["flops"]["shared"]["total"] < found["flops"]["each"]["total"]
    assert found["figures"]["largest difference of losses, kept and not"] < 1e-4
    assert "five questions a picture, encoded once a step" in (tmp_path / "see-once.md").read_text()
