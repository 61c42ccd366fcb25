"""`benchmarks/pool_hosts.py` measures the pool between hosts beside what carries it, and prints a line for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = """
import sys
from benchmarks import pool_hosts
pool_hosts.SIZES, sys.argv = (4096, 3 * pool_hosts.PIECE_BYTES + 64), ["pool_hosts.py", "--samples", "1"]
pool_hosts.main()
"""


@pytest.mark.full
def test_the_pool_between_hosts_is_measured_beside_what_carries_it():
    done = subprocess.run([sys.executable, "-c", SMALL], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    _, _, *rows = done.stdout.splitlines()
    assert [row.split("|")[2].strip() for row in rows] == ["pool", "ZeroMQ with CURVE", "ZeroMQ without", "TCP"] * 2
