"""Processes of one machine that talk to each other, and notice when one is gone."""

import gc
import os
import re
import socket
import threading
import time

import pytest
from torch.distributed import HashStore

from flowtrain_lightning.pool import Mesh, PeerFailed, PoolError, State
from flowtrain_lightning.pool.record import MAX_PAYLOAD, Kind, Record, encode_record
from tests.pool.ranks import join_job, labels, meshes, on_all_ranks, place, receive_all
from tests.processes import assert_all_good, run_ranks

EVERYWHERE = pytest.mark.parametrize("transport", ["shared_memory", "network", "both"])
"""On one host, on hosts of their own, and two on each of two hosts."""


def descriptors():
    gc.collect()  # what other tests have left is not counted
    return len(os.listdir("/proc/self/fd"))


@EVERYWHERE
def test_every_rank_reaches_every_other_one_in_order(transport):
    with meshes(4, transport) as made:
        for mesh in made:
            for peer in set(range(4)) - {mesh.rank}:
                for number in range(5):
                    mesh.send(peer, Record(Kind.RELEASE, mesh.rank, number=number, payload=b"x" * (number % 3)))
        for mesh in made:
            got = receive_all(mesh, 15)
            assert len(got) == 15
            for peer in set(range(4)) - {mesh.rank}:
                of_peer = [record for record in got if record.sender == peer]
                assert [record.number for record in of_peer] == [0, 1, 2, 3, 4]
                assert [len(record.payload) for record in of_peer] == [0, 1, 2, 0, 1]


def test_where_processors_reorder_stores_all_records_go_through_the_sockets(monkeypatch):
    monkeypatch.setattr("flowtrain_lightning.pool.mesh.ORDERED_STORES", False)
    with meshes(2) as (one, other):
        for number in range(100):
            one.send(1, Record(Kind.RELEASE, 0, number=number))
        assert [record.number for record in receive_all(other, 100)] == list(range(100))
        assert other._inbox.take() == []


def test_one_rank_alone_needs_no_store_and_waits_as_asked():
    mesh = Mesh.connect(None, 0, 1, ["backbone 0"])
    start = time.monotonic()
    assert mesh.receive(0.05) == []
    assert 0.04 < time.monotonic() - start < 2
    mesh.close()
    mesh.close()


@EVERYWHERE
def test_sending_never_waits_and_what_is_queued_arrives(transport):
    with meshes(2, transport) as (one, other):
        start = time.monotonic()
        for number in range(600):  # 18 MiB: far more than a socket holds
            one.send(1, Record(Kind.STATUS, 0, number=number, payload=bytes(MAX_PAYLOAD)))
        assert time.monotonic() - start < 5
        got = []
        while len(got) < 600:
            got.extend(other.receive(0.05))
            one.receive()
        assert [record.number for record in got] == list(range(600))


@EVERYWHERE
def test_a_goodbye_is_no_death_and_comes_after_what_was_sent(transport):
    with meshes(3, transport) as (one, other, third):
        other.send(0, Record(Kind.RELEASE, 1, number=5))
        other.close()
        assert [record.number for record in receive_all(one, 1)] == [5]
        assert one.receive(0.5) == []
        assert one.has_left(1)
        assert not one.has_left(2)
        assert one.board[1].state is State.FINISHED
        with pytest.raises(PoolError, match=r"Rank 1 \(encoder 0\) has left"):
            one.send(1, Record(Kind.RELEASE, 0))
        third.send(0, Record(Kind.RELEASE, 2))
        assert len(receive_all(one, 1)) == 1


def sends_and_leaves(rank, ranks):
    mesh = join_job(rank, ranks)
    if rank == 1:
        for number in range(265):
            mesh.send(0, Record(Kind.RELEASE, 1, number=number))
    else:
        while not mesh.board.died(1):
            time.sleep(0.01)
        assert len(receive_all(mesh, 265)) == 265
        assert mesh.receive(0.1) == []
        assert mesh.has_left(1)
    mesh.close()


def test_what_a_process_sent_before_it_left_can_be_read_when_it_has_gone():
    assert_all_good(run_ranks(sends_and_leaves, 2))


@pytest.mark.parametrize(
    ("transport", "cause"),
    [
        ("shared_memory", "closed its connection without a goodbye"),
        ("network", "died (its connection was closed)"),
        ("both", "died (its connection was closed)"),
    ],
)
def test_leaving_without_a_goodbye_is_a_fault_that_names_the_rank(transport, cause):
    told = f"Rank 1 (encoder 0) {cause} in phase 'forward of encoder batch 3' of step 12"
    with meshes(2, transport) as (one, other):
        other.page.enter("forward of encoder batch 3", 12)
        other.close(goodbye=False)
        with pytest.raises(PeerFailed, match=re.escape(told)):
            one.receive(5)
        with pytest.raises(PeerFailed):
            one.receive()
        assert one.board[0].blames == 1


@EVERYWHERE
def test_a_rank_that_failed_is_reported_with_its_error_though_it_closes_in_good_order(transport):
    with meshes(2, transport) as (one, other):
        other.page.fail("Traceback: ValueError: bad picture")
        other.close()
        with pytest.raises(PeerFailed, match="ValueError: bad picture") as caught:
            one.receive(5)
        assert caught.value.rank == 1


def test_a_failure_is_noticed_while_waiting_though_nothing_is_sent():
    with meshes(2) as (one, other):
        threading.Timer(0.2, other.page.fail, ["it broke"]).start()
        start = time.monotonic()
        with pytest.raises(PeerFailed, match="it broke"):
            one.receive(20)
        assert time.monotonic() - start < 2


def test_abort_from_another_thread_wakes_whoever_waits():
    with meshes(2) as (one, _):
        threading.Timer(0.2, one.abort, ["Rank 1 was stopped.", 1]).start()
        start = time.monotonic()
        with pytest.raises(PeerFailed, match=r"Rank 1 was stopped\."):
            one.receive(20)
        assert time.monotonic() - start < 2


def test_waiting_costs_no_time_of_the_processor():
    with meshes(2) as (one, _):
        start = time.process_time()
        one.receive(1.0)
        assert time.process_time() - start < 0.05


@EVERYWHERE
def test_ranks_that_do_not_come_are_named(transport):
    with pytest.raises(
        PoolError, match=r"waited 0\.3 s for these ranks to start, in vain: 1 \(encoder 0\), 2 \(encoder 1\)"
    ):
        Mesh.connect(HashStore(), 0, 3, labels(3), timeout=0.3, **place(transport, 0))


def test_a_rank_waits_no_longer_than_asked_for_another_one_whose_name_the_store_does_not_know():
    with pytest.raises(PoolError, match=r"Rank 2 \(encoder 1\) waited 0\.3 s .* in vain: 0 \(backbone 0\), 1"):
        Mesh.connect(HashStore(), 2, 3, labels(3), timeout=0.3)


def test_a_rank_that_loses_the_store_says_so():
    class LostStore:
        def set(self, key, value):
            raise RuntimeError("failed to recv, got 0 bytes")

    with pytest.raises(PoolError, match=r"Rank 1 \(encoder 0\) lost the store through which the ranks meet"):
        Mesh.connect(LostStore(), 1, 2, labels(2))


def test_a_rank_that_finds_the_store_lost_when_it_asks_who_is_missing_says_so():
    class LostStore:
        def set(self, key, value):
            pass

        def check(self, keys):
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(PoolError, match=r"Rank 0 \(backbone 0\) lost the store through which the ranks meet"):
        Mesh.connect(LostStore(), 0, 2, labels(2), timeout=0.1)


def test_a_rank_that_ends_while_others_start_is_named_at_once():
    store = HashStore()

    def connect(rank):
        with pytest.raises(PoolError, match=r"Rank 1 \(encoder 0\)"):
            Mesh.connect(store, rank, 3, labels(3), timeout=[20, 0.5][rank])

    start = time.monotonic()
    on_all_ranks(connect, 2)
    assert time.monotonic() - start < 10


def test_two_runs_with_one_store_are_told_so():
    store = HashStore()

    def connect(rank):
        with pytest.raises(PoolError, match=r"same store|ended during start-up"):
            Mesh.connect(store, min(rank, 1), 2 + (rank == 1), labels(2 + (rank == 1)), timeout=5)

    on_all_ranks(connect, 2)


def test_a_stranger_who_knows_the_name_cannot_speak_as_a_rank():
    store = HashStore()

    def stranger():
        name = store.get("mesh/0").decode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(f"\0{name}")
            connection.send(encode_record(Record(Kind.PUBLISH, 1, number=2)))
            time.sleep(0.5)

    thread = threading.Thread(target=stranger)
    thread.start()
    with pytest.raises(PoolError, match="introduced itself"):
        Mesh.connect(store, 0, 2, labels(2), timeout=5)
    thread.join()


def test_a_damaged_record_is_an_error():
    with meshes(2) as (one, other):
        other._streams[0].send(b"no record at all, but as long as one is and so no begin of one either")
        with pytest.raises(PoolError, match="A control record from rank 1 was refused"):
            one.receive(5)


def test_nothing_stays_open():
    before = descriptors()
    for _ in range(3):
        with meshes(3):
            pass
    assert descriptors() == before


@pytest.mark.parametrize(("rank", "ranks", "count"), [(2, 2, 2), (-1, 2, 2), (0, 2, 1)])
def test_a_rank_outside_of_the_mesh_is_refused(rank, ranks, count):
    with pytest.raises(PoolError, match="expected one label per rank"):
        Mesh.connect(HashStore(), rank, ranks, labels(count))
