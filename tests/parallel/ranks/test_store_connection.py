"""Ranks whose store is not where they are to meet say what is there instead, and end."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest

from flowtrain_lightning.parallel.ranks import store_connection
from flowtrain_lightning.parallel.ranks.job_store import root_store
from tests.ports import free_port
from tests.processes import Ranks, assert_all_good, run_ranks

SECONDS = 3
_RESET = struct.pack("ii", 1, 0)


def answer(kind: str, connection: socket.socket, kept: list[socket.socket]) -> None:
    if kind == "closes":
        connection.close()
    elif kind == "resets":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.close()
    else:
        if kind == "says its name":
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        elif kind == "says one byte":
            connection.sendall(b"x")
        kept.append(connection)


@contextmanager
def listener(kind: str, family: int = socket.AF_INET) -> Iterator[int]:
    """The port of a program that is no store."""
    host, kept = ("::1" if family == socket.AF_INET6 else "127.0.0.1"), []
    with socket.create_server((host, 0), family=family, backlog=1) as server:

        def run() -> None:
            while kind != "never accepts":
                try:
                    answer(kind, server.accept()[0], kept)
                except OSError:  # the test is over
                    return

        threading.Thread(target=run, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def rendezvous(port, host="127.0.0.1"):
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def come(rank, ranks, words, seconds, within):
    """As rank 1 of a job whose rank 0 never comes."""
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=words):
        root_store(1, 2, timedelta(seconds=seconds))
    assert time.monotonic() - start < within


KINDS = {
    "is silent": r"a program lets everybody in and says nothing\.",
    "says one byte": r"a program answers b'x'\.",
    "says its name": r"a program answers b'SSH-2\.0-OpenSSH_9\.6\\r\\n'\.",
    "closes": r"a program closes every connection\.",
    "resets": r"a program closes every connection\.",
    "never accepts": r"a program lets everybody in and says nothing\.|nothing answers those who connect",
}


def test_a_rank_that_finds_another_program_ends_in_time_and_says_what_it_found_where():
    """One job for each kind of program, and one at an address of the newer kind; all at the same time."""
    places = [(kind, "127.0.0.1", socket.AF_INET) for kind in KINDS] + [("is silent", "::1", socket.AF_INET6)]
    with ExitStack() as running:
        jobs = []
        for kind, host, family in places:
            port = running.enter_context(listener(kind, family))
            where = re.escape(f"The ranks are to meet at {host}:{port} (MASTER_ADDR and MASTER_PORT), but for ")
            words = rf"^{where}\d+ s no store has answered there: ({KINDS[kind]}).*Set MASTER_PORT to another one"
            arguments = [words, SECONDS, 3 * SECONDS + 10]
            jobs.append(running.enter_context(Ranks(come, 1, arguments, rendezvous(port, host))))
        for job in jobs:
            assert_all_good(job.wait(60))


def come_with_much_time(rank, ranks, words):
    store_connection.STRANGE_SECONDS = store_connection.LOOK_SECONDS = 1.0
    come(rank, ranks, words, 3600, 30)


@pytest.mark.parametrize(("kind", "words"), [("is silent", "says nothing"), ("says its name", "answers b'SSH")])
def test_another_program_is_not_waited_for_as_long_as_a_rank_that_may_come(kind, words):
    with listener(kind) as port:
        assert_all_good(run_ranks(come_with_much_time, 1, 60, rendezvous(port), [words]))


def test_where_nobody_listens_the_rank_that_is_missing_is_told():
    words = rf"Rank 1 could not connect to the other ranks: rank 0 was not there within {SECONDS} s, or has ended"
    assert_all_good(run_ranks(come, 1, 60, rendezvous(free_port()), [words, SECONDS, 3 * SECONDS + 10]))


def come_late(rank, ranks):
    if rank == 0:
        time.sleep(2)
    assert root_store(rank, ranks, timedelta(seconds=60)).timeout == timedelta(seconds=60)
    root_store(rank, ranks, timedelta(seconds=60)).set(f"here {rank}", "yes")
    assert root_store(rank, ranks, timedelta(seconds=60)).get(f"here {1 - rank}") == b"yes"
    if rank == 0:
        time.sleep(1)


def test_a_rank_0_that_comes_late_is_waited_for():
    assert_all_good(run_ranks(come_late, 2, 60, rendezvous(free_port())))
