"""`benchmarks/indexing.py` runs, and what it writes are records that are all used."""

from __future__ import annotations

import json

import pytest

from benchmarks.indexing import write_records
from benchmarks.modules import training_records
from flowtrain_lightning.data import JsonFile
from flowtrain_lightning.data.sources.record_store import locations_of
from tests.benchmarks.running import run


def test_records_are_real_ones_again_and_again_under_ids_of_their_own(tmp_path):
    source = training_records()
    real = JsonFile(source)
    places = locations_of(real)
    written = JsonFile(write_records(tmp_path / "train.jsonl", source, len(places) + 2))
    again = locations_of(written)
    assert len(again) == len(places) + 2
    (first,), (same,) = written.records(0, again[:1]), written.records(len(places), again[-2:-1])
    assert first.turns == same.turns == real.records(0, places[:1])[0].turns
    assert first.images == same.images == real.records(0, places[:1])[0].images
    assert (first.id, same.id) == ("0", str(len(places)))


@pytest.mark.full
def test_a_thousand_records_are_indexed_twice_and_trained_from(tmp_path):
    run("indexing.py", tmp_path)
    runs = json.loads((tmp_path / "indexing.json").read_text())["runs"]
    assert [one["command"] for one in runs] == ["indexed", "indexed from kept sizes", "trained, 4 steps"]
    for one in runs:
        assert one["records"] == 1_000
        assert one["cpu_seconds"] > 0
        assert 50 < one["peak_megabytes"] < 2_000
    assert "| indexed from kept sizes |" in (tmp_path / "indexing.md").read_text()
