"""The ranks that a process started, or that started it, while no watchdog looks at them."""

import os
import sys
import time
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from flowtrain_lightning.trainer.launcher import Kin, RankLauncher
from tests.processes import run_ranks


def looks_after(rank, ranks, code, needed, watched):
    """Rank 0 and its child, rank 1, that has ended."""
    kin = Kin()
    kin.labels, kin.folder = ["backbone 0", "encoder 0"], Path(os.environ["FOLDER"])
    kin.needed, kin.watched = needed == "needed", watched == "watched"
    kin.know({1: lambda: int(code)})
    time.sleep(1)
    print((kin.folder / "fault-rank0.txt").exists())


def outcome(code, needed="", watched=""):
    (result,) = run_ranks(looks_after, 1, arguments=(str(code), needed, watched))
    return result.code, result.err + result.out


def test_a_child_that_ended_with_an_error_ends_rank_0():
    sentence = "Rank 1 (encoder 0) ended with exit code 3 outside of fit and its like. Its own output says why."
    assert outcome(3) == (1, f"\nflowtrain: {sentence}\n")


def test_so_does_any_child_that_rank_0_waits_for():
    code, said = outcome(0, "needed")
    assert code == 1
    assert "Rank 1 (encoder 0) ended with exit code 0 during start-up, before it had joined the other ranks" in said


def test_a_child_that_has_done_its_work_does_not():
    assert outcome(0) == (0, "False\n")


def test_what_happens_while_a_watchdog_runs_is_left_to_it():
    assert outcome(3, "needed", "watched") == (0, "False\n")


@pytest.mark.parametrize("first", ["-c", "-", ""])  # python -c, python -, python < script.py
def test_what_no_other_rank_could_run_is_refused_before_any_starts(first, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", [first])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    launcher = RankLauncher(LightningEnvironment(), 2, 1, check=lambda trainer: pytest.fail("planned in vain"))
    with pytest.raises(MisconfigurationException, match=r"Save it as a file and run that, or set Trainer\(devices=1\)"):
        launcher.launch(pytest.fail)
