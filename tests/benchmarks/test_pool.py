"""`benchmarks/pool.py` measures the pool beside its peers, at tiny sizes, and says all that it promises."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = """
import sys
from benchmarks import pool
pool.SAMPLES, pool.READERS, pool.BUSY_PROCESSES, pool.WAITING_SECONDS = {4 << 10: 1, 1 << 20: 1}, (1, 2), 0, 0.2
sys.argv = ["pool.py", "--quick", "--out", sys.argv[1]]
pool.main()
"""


@pytest.mark.full
def test_the_pool_is_measured_beside_its_peers(tmp_path):
    command = [sys.executable, "-c", SMALL, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the readers that it has started
    assert process.returncode == 0, out + err
    runs = json.loads((tmp_path / "pool.json").read_text())["runs"]
    sizes = {
        (run["way"], run["cores"], run["readers"], run["bytes"]) for run in runs if "there_us" in run and "bytes" in run
    }
    for way in ("pool", "gloo send/recv", "torch.multiprocessing.Queue", "TCPStore"):
        assert {size[1:] for size in sizes if size[0] == way} == {
            *((cores, 1, nbytes) for cores in ("idle", "busy") for nbytes in (4 << 10, 1 << 20)),
            *(("idle", 2, nbytes) for nbytes in (4 << 10, 1 << 20)),
        }
    assert {run["way"] for run in runs} >= {"memcpy", "hot", "stream", "waiting", "wake-up"}
    assert "| put + get + release of 4 KiB " in (tmp_path / "pool.md").read_text()
    assert (tmp_path / "pool.png").stat().st_size > 10_000
