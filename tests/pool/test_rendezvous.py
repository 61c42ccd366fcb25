"""How ranks connect: who does not come is named, and other users are not let in."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, FileStore, HashStore

from flowtrain_lightning.pool import Mesh, PoolError
from flowtrain_lightning.pool.control_records import ControlRecord, Kind, encode_record
from flowtrain_lightning.pool.socket_stream import send_bytes
from tests.pool.ranks import join_job, labels, location_of, on_all_ranks
from tests.processes import assert_all_good, run_ranks

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@pytest.mark.parametrize("transport", ["shared_memory", "network", "both"])
def test_ranks_that_do_not_come_are_named(transport):
    with pytest.raises(
        PoolError, match=r"waited 0\.3 s for these ranks to start, in vain: 1 \(encoder 0\), 2 \(encoder 1\)"
    ):
        Mesh.connect(HashStore(), 0, 3, labels(3), timeout=0.3, **location_of(transport, 0))


def test_a_rank_waits_no_longer_than_asked_for_one_whose_name_is_not_in_the_store():
    with pytest.raises(PoolError, match=r"Rank 2 \(encoder 1\) waited 0\.3 s .* in vain: 0 \(backbone 0\), 1"):
        Mesh.connect(HashStore(), 2, 3, labels(3), timeout=0.3)


def test_a_rank_that_loses_the_store_says_so():
    class LostStore:
        def set(self, key, value):
            raise DistNetworkError("failed to recv, got 0 bytes")

    with pytest.raises(PoolError, match=r"Rank 1 \(encoder 0\) lost the store through which the ranks find each other"):
        Mesh.connect(LostStore(), 1, 2, labels(2))


def test_a_rank_that_loses_the_store_while_it_waits_says_so():
    class LostStore:
        def set(self, key, value):
            pass

        def check(self, keys):
            raise DistNetworkError("Connection reset by peer")

    with pytest.raises(
        PoolError, match=r"Rank 0 \(backbone 0\) lost the store through which the ranks find each other"
    ):
        Mesh.connect(LostStore(), 0, 2, labels(2), timeout=0.1)


def test_a_rank_that_ends_while_others_start_is_named_at_once():
    store = HashStore()

    def connect(rank):
        with pytest.raises(PoolError, match=r"Rank 1 \(encoder 0\)"):
            Mesh.connect(store, rank, 3, labels(3), timeout=[100, 0.5][rank])

    start = time.monotonic()
    on_all_ranks(connect, 2)
    assert time.monotonic() - start < 50


def test_two_runs_with_one_store_are_told_so():
    store = HashStore()

    def connect(rank):
        with pytest.raises(PoolError, match=r"same store|ended during start-up"):
            Mesh.connect(store, min(rank, 1), 2 + (rank == 1), labels(2 + (rank == 1)), timeout=5)

    on_all_ranks(connect, 2)


def test_a_process_that_knows_the_name_cannot_speak_as_a_rank():
    store = HashStore()

    def speak():
        name = store.get("mesh/0").decode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(f"\0{name}")
            connection.send(encode_record(ControlRecord(Kind.PUBLISH, 1, number=2)))
            time.sleep(0.5)

    thread = threading.Thread(target=speak)
    thread.start()
    with pytest.raises(PoolError, match="introduced itself"):
        Mesh.connect(store, 0, 2, labels(2), timeout=5)
    thread.join()


def connects_while_another_user_tries(rank, ranks):
    """Rank 2 is no rank but another user's process, which knows everything that a rank knows but is not let in."""
    folder = Path(os.environ["FOLDER"])
    if rank == 2:
        name = FileStore(str(folder / "store"), 2).get("mesh/0").decode()
        memory, wake_event = os.memfd_create("test"), os.eventfd(0)
        pid = int((folder / "pid0").read_text())
        marker = os.open(folder / "refused", os.O_CREAT | os.O_WRONLY)
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(f"\0{name}")
            try:
                send_bytes(connection, encode_record(ControlRecord(Kind.HELLO, 1, number=2)), (memory, wake_event))
                answer = connection.recv(1)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
        assert answer == b"", "a rank spoke to another user's process"
        with pytest.raises(PermissionError):
            os.listdir(f"/proc/{pid}/fd")
        os.write(marker, b"!")
        os._exit(0)
    if rank == 0:
        (folder / "pid0").write_text(str(os.getpid()))
    else:
        while not ((folder / "refused").exists() and (folder / "refused").read_bytes()):
            time.sleep(0.01)
    mesh = join_job(rank, 2)
    mesh.send(1 - rank, ControlRecord(Kind.RELEASE, rank))
    assert len(mesh.receive(50)) == 1
    mesh.close()


@as_root
def test_a_process_of_another_user_is_not_let_in_and_does_no_harm():
    assert_all_good(run_ranks(connects_while_another_user_tries, 3))


def connects_to_another_user(rank, ranks):
    """The socket that is said to be rank 0's belongs to another user."""
    folder = Path(os.environ["FOLDER"])
    name = f"flowtrain-test-{folder.name}"
    if rank == 0:
        FileStore(str(folder / "store"), 2).set("mesh/0", name)
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            os.write(1, b"listens")
            connection, _ = listener.accept()
            assert connection.recv(1) == b"", "a rank spoke to another user's process"
        os._exit(0)
    while (folder / "rank0.out").read_text() != "listens":
        time.sleep(0.01)
    with pytest.raises(PoolError, match=r"Rank 0 \(backbone 0\) runs as another user"):
        join_job(rank, ranks)


@as_root
def test_a_rank_does_not_trust_a_socket_of_another_user():
    assert_all_good(run_ranks(connects_to_another_user, 2))
