"""Ranks that start or end where nobody watches: whatever happens to one, the others end in time and say so."""

from __future__ import annotations

import atexit
import os
import random
import re
import signal
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from flowtrain_lightning.allocator import Allocation, Layout
from flowtrain_lightning.pool import PeerFailed
from flowtrain_lightning.runtime.health import process_health
from flowtrain_lightning.runtime.job import Job
from tests.pool.faults import TOLD, slowness
from tests.ports import free_port
from tests.processes import Ranks

RANKS = 3
ALLOCATION = Allocation(
    "separate", {"encoder": Layout(), "backbone": Layout(data=2)}, {"encoder": (2,), "backbone": (0, 1)}
)
SECONDS = 4.0
"""How long ranks wait for others; collectives give up after twice as long."""

SENTENCES = re.compile(
    r"^Rank \d could not connect to the other ranks: .*(rank|ranks|them|all) .*(come|has ended|was not there)"
    r"|^Rank \d \(.*\) (died|ended during start-up|waited 4 s for these ranks to start|lost the store)"
    r"|^A rank ended during start-up",
    re.MULTILINE,  # gloo prints lines of its own under PyTorch 2.10
)


def start(rank: int, ranks: int, victim: int, calls: int) -> None:
    """Joins the job and waits for the others; the victim is killed when it has called, or left, so many functions."""
    if rank == victim:

        def count(*_: object) -> None:
            nonlocal calls
            calls -= 1
            if not calls:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
    try:
        job = join(rank)
        while True:
            job.mesh.receive(1.0)
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(TOLD)


def join(rank: int) -> Job:
    """This rank's place in a job of its own."""
    return Job(
        rank,
        ALLOCATION,
        process_health(),
        backend="gloo",
        hang_timeout=SECONDS,
        timeout=timedelta(seconds=SECONDS),
        fault_folder=Path(os.environ["FOLDER"]),
    )


def kill_while_they_start(moments: list[tuple[int, int]]) -> None:
    with ExitStack() as jobs:
        started = []
        for victim, calls in moments:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            started.append((victim, jobs.enter_context(Ranks(start, RANKS, [victim, calls], place))))
        since = time.monotonic()
        for victim, ranks in started:
            for result in ranks.wait(100):
                assert result.code == (-signal.SIGKILL if result.rank == victim else TOLD), str(result)
                assert result.rank == victim or SENTENCES.search(result.out), str(result)
        # Twice what all these jobs take where nothing else runs: another test may have one of two cores.
        assert time.monotonic() - since < 2 * (6 * SECONDS + 5) * slowness()


@pytest.mark.full
def test_the_others_end_in_time_with_a_sentence():
    kill_while_they_start([(0, 116), (1, 276), (2, 664), (1, 900)])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_so_they_do_wherever_one_is_killed(seed):
    choose = random.Random(seed)
    kill_while_they_start([(choose.randrange(RANKS), choose.randint(1, 1800)) for _ in range(8)])


def end_past_clean_up(rank: int, ranks: int) -> None:
    """One rank fails, and every rank leaves the interpreter at once, as where a callback's clean-up raises."""
    atexit._clear()  # what the process registered of which this one is a fork
    job = join(rank)
    try:
        if rank == 2:
            raise ValueError("a fault of the test")
        while True:
            job.mesh.receive(1.0)
    except (ValueError, PeerFailed) as error:
        sys.last_value = error  # as the interpreter does
        atexit._run_exitfuncs()


def test_a_rank_that_ends_past_its_clean_up_says_why_all_the_same():
    with Ranks(end_past_clean_up, RANKS, env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}) as ranks:
        for result in ranks.wait(60 * slowness()):
            text = (ranks.folder / f"fault-rank{result.rank}.txt").read_text()
            assert text.startswith("Rank 2 (encoder 0) failed"), text
            assert "ValueError: a fault of the test" in text
