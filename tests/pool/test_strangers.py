"""Who may join a mesh, and where its memory lies: other users are not let in, and /dev/shm is not used."""

import os
import socket
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore

from flowtrain_lightning.pool import Key, Pool, PoolError
from flowtrain_lightning.pool.record import Kind, Record, encode_record
from flowtrain_lightning.pool.sockets import send_bytes
from tests.pool.ranks import join_job
from tests.processes import assert_all_good, run_ranks

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


def large_pool(rank, ranks):
    mesh = join_job(rank, ranks)
    pool = Pool.open(mesh, 96 << 20, 0)
    if rank == 0:
        assert pool.put(Key(0, 0, 0), [torch.ones(20 << 20)], [1]) is not None
    else:
        while (lease := pool.get(Key(0, 0, 0))) is None:
            pool.poll(1.0)
        assert lease.tensors[0].sum() == 20 << 20
        lease.release()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
    assert not [line for line in mapped if "/dev/shm/sem." not in line], "multiprocessing's semaphores are not ours"
    assert not [file for file in Path("/proc/self/fd").iterdir() if "/dev/shm" in os.path.realpath(file)]
    while pool.counters.current.now:
        pool.poll(1.0)
    pool.close()
    mesh.close()


def test_a_pool_larger_than_a_containers_shared_memory_uses_none_of_it():
    assert_all_good(run_ranks(large_pool, 2))


def meets_while_a_stranger_tries(rank, ranks):
    """Rank 2 is no rank but another user's process, which knows everything that a rank knows but is not let in."""
    folder = Path(os.environ["FOLDER"])
    if rank == 2:
        name = FileStore(str(folder / "store"), 2).get("mesh/0").decode()
        memory, bell = os.memfd_create("stranger"), os.eventfd(0)
        pid = int((folder / "pid0").read_text())
        marker = os.open(folder / "refused", os.O_CREAT | os.O_WRONLY)
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(f"\0{name}")
            try:
                send_bytes(connection, encode_record(Record(Kind.HELLO, 1, number=2)), (memory, bell))
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
    mesh.send(1 - rank, Record(Kind.RELEASE, rank))
    assert len(mesh.receive(20)) == 1
    mesh.close()


@as_root
def test_a_process_of_another_user_is_not_let_in_and_does_no_harm():
    assert_all_good(run_ranks(meets_while_a_stranger_tries, 3))


def meets_another_user(rank, ranks):
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
    assert_all_good(run_ranks(meets_another_user, 2))
