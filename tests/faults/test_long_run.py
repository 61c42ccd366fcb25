"""`make long-run` tells growth from a size that stays."""

import subprocess
import sys

import pytest

from tests.faults.long_run import LOOKS, Held, grown


def test_growth_is_the_slope_of_the_second_half():
    first = [Held(step, 0.0, 100 * step, 0, 0, 9, 9, 0) for step in range(0, 500, 10)]
    second = [Held(step, 0.0, 50_000 + 4 * step, 0, 0, 9, 9, 0) for step in range(500, 1000, 10)]
    assert grown(first + second) == pytest.approx(4.0)


@pytest.mark.full
def test_every_rank_is_looked_at_as_often():
    command = [sys.executable, "-m", "tests.faults.long_run", "--steps", str(2 * LOOKS)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    tables = printed.split("flowtrain, rank")
    assert len(tables) == 3
    assert all(len(table.splitlines()) == LOOKS + 2 for table in tables), "a name, a heading, and the looks"
