"""`benchmarks/memory.py` runs, at a tiny size, and tells growth from noise."""

import json

import numpy as np
import pytest

from benchmarks.memory import growth
from tests.benchmarks.running import run


def test_growth_is_the_slope_of_the_second_half():
    step = np.arange(0, 1000, 10)
    memory = np.where(step < 500, 100 * step, 50_000 + 4 * step)
    found = growth(np.stack([step, memory, 20 + step // 500, 0 * step + 9], 1))
    assert found["kb_per_step"] == pytest.approx(4.0)
    assert (found["descriptors"], found["threads"]) == (0, 0)


@pytest.mark.full
def test_it_writes_a_line_for_every_rank(tmp_path):
    run("memory.py", tmp_path)
    ranks = json.loads((tmp_path / "memory.json").read_text())["ranks"]
    assert [each["steps"] for each in ranks.values()] == [40, 40]
