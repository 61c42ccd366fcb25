"""Ranks that are connected with each other: records come in order, and who is gone is noticed."""

import gc
import os
import re
import threading
import time

import pytest
from torch.distributed import HashStore

from flowtrain_lightning.pool import Mesh, PeerFailed, PoolError, State
from flowtrain_lightning.pool.control_records import MAX_PAYLOAD, ControlRecord, Kind
from flowtrain_lightning.pool.status_page import PAGE_BYTES
from tests.pool.ranks import join_job, labels, mesh_and_bare_peer, meshes, receive_all
from tests.processes import assert_all_good, run_ranks

EVERYWHERE = pytest.mark.parametrize(
    "transport", ["shared_memory", "both", pytest.param("network", marks=pytest.mark.full)]
)
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
                    mesh.send(peer, ControlRecord(Kind.RELEASE, mesh.rank, number=number, payload=b"x" * (number % 3)))
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
            one.send(1, ControlRecord(Kind.RELEASE, 0, number=number))
        assert [record.number for record in receive_all(other, 100)] == list(range(100))
        assert not any(other.page.memory[PAGE_BYTES + 64 :]), "nothing was put into the inbox"


def test_one_rank_alone_needs_no_store_and_waits_as_asked():
    mesh = Mesh.connect(None, 0, 1, ["backbone 0"])
    start = time.monotonic()
    assert mesh.receive(0.05) == []
    assert 0.04 < time.monotonic() - start < 20
    mesh.close()
    mesh.close()


@EVERYWHERE
def test_sending_never_waits_and_what_is_queued_arrives(transport):
    with meshes(2, transport) as (one, other):
        start = time.monotonic()
        for number in range(200):  # 6 MiB: far more than a socket holds
            one.send(1, ControlRecord(Kind.STATUS, 0, number=number, payload=bytes(MAX_PAYLOAD)))
        assert time.monotonic() - start < 60
        got = []
        while len(got) < 200:
            got.extend(other.receive(0.05))
            one.receive()
        assert [record.number for record in got] == list(range(200))


@EVERYWHERE
def test_a_goodbye_is_no_death_and_comes_after_what_was_sent(transport):
    with meshes(3, transport) as (one, other, third):
        other.send(0, ControlRecord(Kind.RELEASE, 1, number=5))
        other.close()
        assert [record.number for record in receive_all(one, 1)] == [5]
        assert one.receive(0.5) == []
        assert one.has_left(1)
        assert not one.has_left(2)
        assert one.board[1].state is State.FINISHED
        with pytest.raises(PoolError, match=r"Rank 1 \(encoder 0\) has left"):
            one.send(1, ControlRecord(Kind.RELEASE, 0))
        third.send(0, ControlRecord(Kind.RELEASE, 2))
        assert len(receive_all(one, 1)) == 1


def sends_and_leaves(rank, ranks):
    mesh = join_job(rank, ranks)
    if rank == 1:
        for number in range(265):
            mesh.send(0, ControlRecord(Kind.RELEASE, 1, number=number))
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
            one.receive(50)
        with pytest.raises(PeerFailed):
            one.receive()
        assert one.board[0].blames == 1


@EVERYWHERE
def test_a_rank_that_failed_is_reported_though_it_closes_in_good_order(transport):
    with meshes(2, transport) as (one, other):
        other.page.fail("Traceback: ValueError: bad picture")
        other.close()
        with pytest.raises(PeerFailed, match="ValueError: bad picture") as caught:
            one.receive(50)
        assert caught.value.rank == 1


def test_a_failure_is_noticed_while_waiting_though_nothing_is_sent():
    with meshes(2) as (one, other):
        threading.Timer(0.2, other.page.fail, ["it broke"]).start()
        with pytest.raises(PeerFailed, match="it broke"):
            one.receive(50)


def test_abort_from_another_thread_wakes_whoever_waits():
    with meshes(2) as (one, _):
        threading.Timer(0.2, one.abort, ["Rank 1 was stopped.", 1]).start()
        with pytest.raises(PeerFailed, match=r"Rank 1 was stopped\."):
            one.receive(50)


def test_waiting_costs_no_time_of_the_processor():
    with meshes(2) as (one, _):
        start = time.process_time()
        one.receive(1.0)
        assert time.process_time() - start < 0.05


def test_a_damaged_record_is_an_error():
    with mesh_and_bare_peer() as (mesh, peer):
        peer.local[0].socket.send(b"no record at all, but as long as one is and so no begin of one either")
        with pytest.raises(PoolError, match="A control record from rank 1 was refused"):
            mesh.receive(50)


def test_records_of_a_later_link_are_kept_and_those_of_a_former_one_dropped():
    with meshes(2) as (one, other):
        for link in (2, 1, 1, 2, 0):
            one.send(1, ControlRecord(Kind.RELEASE, 0, link, number=link))
        assert other.begin_link() == 1
        assert [record.number for record in receive_all(other, 2)] == [1, 1]
        assert other.begin_link() == 2
        assert [record.number for record in receive_all(other, 2)] == [2, 2]
        assert other.receive() == []


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
