"""The probes of a GPU can be started everywhere, and the calls that start them end in time."""

from __future__ import annotations

import pytest
import torch

from benchmarks import probe_gpu
from tests import on_a_gpu


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert probe_gpu.main() == 1
    assert capsys.readouterr().out == "There is no GPU, so nothing was probed.\n"


def test_a_probe_that_fails_says_why(capsys):
    probe_gpu.tell("one", lambda: str(1 / 0))
    assert capsys.readouterr().out == "one: failed: ZeroDivisionError: division by zero\n"


def test_parts_of_a_call_share_its_time(capfd):
    parts = {
        "short": ("-c", "print('hello')"),
        "wrong": ("-c", "raise SystemExit(3)"),
        "long": ("-c", "import time; time.sleep(60)"),
        "late": ("-c", "print('never')"),
    }
    ended = on_a_gpu.run_parts(parts, seconds=3.0)
    assert [how.partition(" after")[0] for how in ended.values()] == [
        "passed",
        "failed with code 3",
        "took too long",
        "not begun: no time was left",
    ]
    assert "never" not in capfd.readouterr().out
