"""`benchmarks/kept_features.py` runs, with few items: both ways give back what they were given."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("lmdb")

from tests.benchmarks.running import run


@pytest.mark.full
def test_files_and_a_database_keep_the_same_features(tmp_path):
    run("kept_features.py", tmp_path)
    found = json.loads((tmp_path / "kept-features.json").read_text())["figures"]
    assert [*found] == [f"{rows} rows, {way}" for rows in ("64", "1,024") for way in ("file for each item", "LMDB")]
    assert all(figure > 0 for each in found.values() for figure in each.values())
