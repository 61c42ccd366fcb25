"""Ranks that claim to run on hosts of their own meet over TCP."""

import gc
import os
import socket
import threading
import time

import pytest
from torch.distributed import HashStore

from flowtrain_lightning.pool import Mesh, PeerFailed, PoolError, State
from flowtrain_lightning.pool.record import MAX_PAYLOAD, Kind, Record
from tests.pool import faults
from tests.pool.ranks import join_job, labels, meshes, on_all_ranks, place
from tests.pool.test_random_faults import hit_all, kill_while_they_start


def receive_all(mesh, count, seconds=10.0):
    got, end = [], time.monotonic() + seconds
    while len(got) < count and time.monotonic() < end:
        got.extend(mesh.receive(0.2))
    return got


def wait_until(holds, seconds=5.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


@pytest.mark.parametrize("transport", ["network", "both"])
def test_every_rank_reaches_every_other_one_in_order(transport):
    with meshes(4, transport) as made:
        for mesh in made:
            for peer in set(range(4)) - {mesh.rank}:
                for number in range(5):
                    mesh.send(peer, Record(Kind.RELEASE, mesh.rank, number=number, payload=b"x" * (number % 3)))
        for mesh in made:
            got = receive_all(mesh, 15)
            for peer in set(range(4)) - {mesh.rank}:
                assert [record.number for record in got if record.sender == peer] == [0, 1, 2, 3, 4]


def test_sending_never_waits_and_what_is_queued_arrives():
    with meshes(2, "network") as (one, other):
        start = time.monotonic()
        for number in range(600):  # 18 MiB: far more than a socket holds
            one.send(1, Record(Kind.DATA, 0, start=number, payload=bytes(MAX_PAYLOAD)))
        assert time.monotonic() - start < 5
        got = []
        while len(got) < 600:
            got.extend(other.receive(0.05))
            one.receive()
        assert [record.start for record in got] == list(range(600))


def test_a_goodbye_is_no_death_and_comes_after_what_was_sent():
    with meshes(3, "network") as (one, other, third):
        other.send(0, Record(Kind.RELEASE, 1, number=5))
        other.close()
        assert [record.number for record in receive_all(one, 1)] == [5]
        assert one.receive(0.5) == []
        assert one.has_left(1)
        assert one.board[1].state is State.FINISHED
        with pytest.raises(PoolError, match=r"Rank 1 \(encoder 0\) has left"):
            one.send(1, Record(Kind.RELEASE, 0))
        third.send(0, Record(Kind.RELEASE, 2))
        assert len(receive_all(one, 1)) == 1


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


def test_leaving_without_a_goodbye_is_a_fault_that_names_the_rank():
    with meshes(2, "network") as (one, other):
        other.page.enter("forward of encoder batch 3", 12)
        other.close(goodbye=False)
        with pytest.raises(PeerFailed, match=r"Rank 1 \(encoder 0\) died .* in phase 'forward of encoder batch 3' of"):
            one.receive(5)
        assert one.board[0].blames == 1


def test_a_rank_that_failed_is_reported_with_its_error():
    with meshes(2, "network") as (one, other):
        other.page.fail("Traceback: ValueError: bad picture")
        other.close()
        with pytest.raises(PeerFailed, match="ValueError: bad picture") as caught:
            one.receive(5)
        assert caught.value.rank == 1


def the_connection(mesh, purpose):
    if purpose == "records":
        return mesh._streams[0]._connection
    if purpose == "pages":
        return next(iter(mesh.elsewhere._pages._peers.values())).socket
    return mesh.elsewhere._carrier._ways[0].connection


@pytest.mark.parametrize("purpose", ["records", "pages", "entries"])
def test_damaged_bytes_are_an_error_whichever_connection_brings_them(purpose):
    with meshes(2, "network") as (one, other):
        the_connection(other, purpose).send(b"no record at all, but as long as one is and so no begin of one either")
        with pytest.raises(PoolError, match="A control record from rank 1 was refused"):
            one.receive(5)


def test_waiting_costs_little_time_of_the_processor():
    with meshes(2, "network") as (one, _):
        start = time.process_time()
        one.receive(1.0)
        assert time.process_time() - start < 0.2


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(
        PoolError, match=r"waited 0\.3 s for these ranks to start, in vain: 1 \(encoder 0\), 2 \(encoder 1\)"
    ):
        Mesh.connect(HashStore(), 0, 3, labels(3), timeout=0.3, **place("network", 0))


def test_an_address_of_another_host_is_refused():
    with pytest.raises(PoolError, match=r"cannot be reached at 192\.0\.2\.7 .* expected an IPv4 address of this host"):
        Mesh.connect(HashStore(), 0, 2, labels(2), address="192.0.2.7")


def test_strangers_who_speak_or_are_silent_neither_get_in_nor_stop_the_ranks():
    store, strangers = HashStore(), []

    def knock():
        while not store.check(["mesh/place/0"]):
            time.sleep(0.01)
        _, host, port = store.get("mesh/place/0").decode().split("\n")
        for said in (b"", b"FLT1" + bytes(48), b"GET / HTTP/1.1\r\n\r\n" * 9):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(said)
            strangers.append(connection)

    def connect(rank):
        if rank == 1:
            thread.join()
        return Mesh.connect(store, rank, 2, labels(2), timeout=20, **place("network", rank))

    thread = threading.Thread(target=knock)
    thread.start()
    start = time.monotonic()
    made = on_all_ranks(connect, 2)
    assert time.monotonic() - start < 8
    made[1].send(0, Record(Kind.RELEASE, 1, number=7))
    assert [record.number for record in receive_all(made[0], 1)] == [7]
    for connection in strangers:
        connection.close()
    on_all_ranks(lambda rank: made[rank].close(), 2)


def test_two_runs_with_one_store_are_told_so():
    store = HashStore()

    def connect(rank):
        ranks = 2 + rank
        with pytest.raises(PoolError, match=r"same store|during start-up|in vain"):
            Mesh.connect(store, rank, ranks, labels(ranks), timeout=2, **place("network", rank))

    on_all_ranks(connect, 2)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["network", "both"])
@pytest.mark.parametrize("first", range(0, 40, 8))
def test_whoever_is_hit_is_named_by_all_others_in_time_also_on_other_hosts(monkeypatch, transport, first):
    def join(rank, ranks, timeout=60.0):
        return join_job(rank, ranks, timeout, **place(transport, rank))

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
