"""`benchmarks/layouts.py` runs at a tiny size, and says all that it promises."""

from __future__ import annotations

import json

import pytest

from benchmarks.layout_runs import LAYOUTS, layer_bytes
from tests.benchmarks.running import run


@pytest.mark.full
@pytest.mark.timeout(700)
def test_memory_and_time_of_a_layout_stand_beside_those_of_lightnings_own(tmp_path):
    printed = run("layouts.py", tmp_path, "--layouts", "HSDP 2 x 2", deadline=600)
    results = json.loads((tmp_path / "layouts.json").read_text())
    assert "beside ModelParallelStrategy" in printed
    assert "its share + one block" in printed
    (sides,) = results["runs"].values()
    assert set(sides) == {"flowtrain", "lightning"}
    assert all(seconds > 0 for rounds in sides.values() for seconds in rounds)


def test_the_half_that_is_laid_out_has_four_hundred_megabytes():
    whole, gathered = layer_bytes("400 MB")
    assert whole == pytest.approx(400e6, rel=0.05)
    assert gathered < whole / 5


def test_the_layouts_say_among_how_many_ranks_weights_are_shared():
    assert {name: each.sharers for name, each in LAYOUTS.items()} == {"replicate": 1, "FSDP2": 4, "HSDP 2 x 2": 2}
