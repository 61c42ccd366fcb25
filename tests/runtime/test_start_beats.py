"""Ranks that have not joined yet, as if each had a node of its own."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from flowtrain_lightning.parallel.ranks.job_store import root_store
from flowtrain_lightning.runtime import start_beats
from flowtrain_lightning.runtime.health import process_health
from flowtrain_lightning.runtime.start_beats import StartBeats
from flowtrain_lightning.runtime.watched_process import WatchedProcess
from tests.ports import free_port
from tests.processes import assert_all_good, run_ranks

pytestmark = pytest.mark.full

SILENT_SECONDS = 5.0
"""Long enough for a busy machine to let every rank give its sign."""


def rendezvous():
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def start(rank, ranks, victim, end):
    """All ranks wait for ever, but the victim, which comes to its end."""
    start_beats.SILENT_SECONDS = SILENT_SECONDS
    store = root_store(rank, ranks, timedelta(seconds=60))
    with StartBeats(store, rank, ranks, Path(os.environ["FOLDER"])):
        time.sleep(2.0)
        if rank == victim:
            if end == "raise":
                raise ValueError("no such file")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


@pytest.mark.parametrize(
    ("victim", "end", "sentence"),
    [
        (1, "raise", "Rank 1 failed during start-up: ValueError: no such file"),
        (0, "raise", "Rank 0 failed during start-up: ValueError: no such file"),
        (
            2,
            "kill",
            "Rank 2 has ended or was stopped, or its node has, during start-up: nothing was heard of it for 5 s.",
        ),
        (0, "kill", "Rank 0, or whoever keeps what ranks tell each other at the start, has ended"),
    ],
    ids=["a rank raises", "rank 0 raises", "a rank is killed", "rank 0 is killed"],
)
def test_all_ranks_end_with_a_sentence_when(victim, end, sentence):
    results = run_ranks(start, 3, deadline=50, arguments=[victim, end], env=rendezvous())
    for result in results:
        assert result.code == (-signal.SIGKILL if result.rank == victim and end == "kill" else 1), str(result)
        assert result.rank == victim or f"flowtrain: {sentence}" in result.err, str(result)


def join(rank, ranks):
    """Rank 1 has joined the others long before rank 0 has, and gives no sign any more."""
    start_beats.SILENT_SECONDS = SILENT_SECONDS
    store = root_store(rank, ranks, timedelta(seconds=60))
    with StartBeats(store, rank, ranks, Path(os.environ["FOLDER"])):
        time.sleep(1.0 if rank else SILENT_SECONDS + 2)


def test_ranks_that_have_joined_are_not_missed():
    assert_all_good(run_ranks(join, 2, env=rendezvous()))


def meet_in_vain(rank, ranks):
    """Rank 1 is the first one of a node on which rank 2 was killed before it had met anybody."""
    store = root_store(rank, ranks, timedelta(seconds=60))
    if rank == 1:
        process_health().watch_processes(1, {2: WatchedProcess(os.getpid(), lambda: -9)})
    with process_health().starting(Path(os.environ["FOLDER"]), rank, ranks, 600, store):
        time.sleep(60)


def test_a_rank_that_was_killed_before_it_came_ends_the_other_nodes_within_seconds():
    start = time.monotonic()
    results = run_ranks(meet_in_vain, 2, deadline=50, env=rendezvous())
    assert time.monotonic() - start < 20
    for result in results:
        assert result.code == 1, str(result)
        assert "flowtrain: Rank 2 ended with exit code -9 during start-up" in result.err, str(result)
