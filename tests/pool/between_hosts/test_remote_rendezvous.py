"""Ranks that claim to run on hosts of their own connect over TCP."""

import gc
import os
import socket
import threading
import time

import pytest
from torch.distributed import HashStore

from flowtrain_lightning.pool import Mesh, PoolError
from flowtrain_lightning.pool.between_hosts.connections import identity
from flowtrain_lightning.pool.between_hosts.peer_messages import Purpose
from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from tests.pool import faults
from tests.pool.ranks import join_job, labels, location_of, mesh_and_bare_peer, meshes, on_all_ranks, receive_all
from tests.pool.test_random_faults import hit_all, kill_while_they_start


def wait_until(holds, seconds=30.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


def test_what_a_rank_does_is_known_on_other_hosts_soon():
    with meshes(2, "network") as (one, other):
        other.page.enter("forward of encoder batch 3", 12)
        wait_until(lambda: one.board[1].phase == "forward of encoder batch 3")
        assert (one.board[1].step, one.board[1].label, one.board[1].pid) == (12, "encoder 0", os.getpid())
        other.page.sigterm = True
        wait_until(lambda: one.board[1].sigterm)
        assert not one.board.stopped(1)
        one.board.kill(1)  # is nobody's business here
        assert not one.board.died(1)


@pytest.mark.parametrize("purpose", Purpose)
def test_damaged_bytes_are_an_error_whichever_connection_brings_them(purpose):
    with mesh_and_bare_peer("network") as (mesh, peer):
        damaged = b"no record at all, but as long as one is and so no begin of one either"
        peer.remote.router.send_multipart([identity(0, purpose), damaged])
        with pytest.raises(PoolError, match="A control record from rank 1 was refused"):
            mesh.receive(50)


def test_waiting_costs_little_time_of_the_processor():
    with meshes(2, "network") as (one, _):
        start = time.process_time()
        one.receive(1.0)
        assert time.process_time() - start < 0.2


def test_an_address_of_another_host_is_refused():
    with pytest.raises(PoolError, match=r"cannot be reached at 192\.0\.2\.7 .* expected an IPv4 address of this host"):
        Mesh.connect(HashStore(), 0, 2, labels(2), address="192.0.2.7", secret="known")


def test_an_address_without_a_secret_is_refused():
    with pytest.raises(PoolError, match="An address was given but no secret"):
        Mesh.connect(HashStore(), 0, 2, labels(2), address="127.0.0.1")


def test_hundreds_who_speak_or_are_silent_neither_get_in_nor_delay_the_ranks():
    store, others = HashStore(), []

    def knock():
        while not store.check(["mesh/host/0"]):
            time.sleep(0.01)
        _, host, *ports = store.get("mesh/host/0").decode().split("\n")
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48)
        for number, said in enumerate((greeting, b"GET / HTTP/1.1\r\n\r\n" * 9, *[b""] * 600)):
            connection = socket.create_connection((host, int(ports[number % 2])))
            connection.sendall(said)
            others.append(connection)

    def connect(rank):
        if rank == 1:
            thread.join()
        return Mesh.connect(store, rank, 2, labels(2), timeout=60, **location_of("network", rank))

    thread = threading.Thread(target=knock)
    thread.start()
    start = time.monotonic()
    made = on_all_ranks(connect, 2)
    assert time.monotonic() - start < 9, "no rank waits until a silent one is given up"
    made[1].send(0, ControlRecord(Kind.RELEASE, 1, number=7))
    assert [record.number for record in receive_all(made[0], 1)] == [7]
    for connection in others:
        connection.close()
    on_all_ranks(lambda rank: made[rank].close(), 2)


def test_two_runs_with_one_store_are_told_so():
    store = HashStore()

    def connect(rank):
        ranks = 2 + rank
        with pytest.raises(PoolError, match=r"same store|during start-up|in vain"):
            Mesh.connect(store, rank, ranks, labels(ranks), timeout=2, **location_of("network", rank))

    on_all_ranks(connect, 2)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["network", "both"])
@pytest.mark.parametrize("first", range(0, 40, 8))
def test_whoever_is_hit_is_named_in_time_also_on_other_hosts(monkeypatch, transport, first):
    def join(rank, ranks, timeout=60.0):
        return join_job(rank, ranks, timeout, **location_of(transport, rank))

    monkeypatch.setattr(faults, "join_job", join)
    hit_all(range(first, first + 8), transport)
    kill_while_they_start(range(first, first + 8), transport)


def test_nothing_stays_open():
    def descriptors():
        gc.collect()  # what other tests have left is not counted
        return len(os.listdir("/proc/self/fd"))

    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        with meshes(3, "both"):
            pass
    assert descriptors() == before
    assert threading.active_count() == threads


@pytest.mark.full
def test_ranks_that_leave_at_the_same_moment_never_wait_for_each_other():
    for _ in range(100):
        with meshes(3, "network"):
            pass
