"""Ranks that are killed or stopped at random moments while they exchange entries, and strangers who want to join."""

import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore

from flowtrain_lightning.pool import Key, PeerFailed, Pool, PoolError
from flowtrain_lightning.pool.record import Kind, Record, encode_record
from flowtrain_lightning.pool.sockets import send_bytes
from tests.pool.ranks import join_job
from tests.processes import Ranks, assert_all_good, run_ranks

RANKS, ROUNDS = 3, 300
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


def exchange(rank, ranks, rounds, seed):
    """Every rank puts entries for all others, reads theirs and checks each; without end when ``rounds`` is 0."""
    choose = random.Random(seed * ranks + rank)
    mesh = join_job(rank, ranks)
    try:
        pool = Pool.open(mesh, 1 << 17, 0)
        Path(os.environ["FOLDER"], f"ready{rank}").touch()
        peers = [peer for peer in range(ranks) if peer != rank]
        turn = 0
        while turn < rounds or not rounds:
            mesh.page.enter("exchange", turn)
            tensor = torch.full((choose.randint(1, 3000),), float(1000 * rank + turn % 1000))
            while pool.put(Key(rank, turn, 0), [tensor], peers) is None:
                pool.poll(1.0)
            for peer in peers:
                while (lease := pool.get(Key(peer, turn, 0))) is None:
                    pool.poll(1.0)
                assert lease.tensors[0].eq(1000 * peer + turn % 1000).all(), "another entry's bytes"
                lease.release()
            turn += 1
        while pool.counters.current.now:
            pool.poll(1.0)
    except PeerFailed as error:
        print(time.monotonic(), error, flush=True)
        os._exit(7)
    pool.close()
    mesh.close()


def hit_at_random(seed):
    """One job, one rank of which is hit at a random moment; what must follow is checked."""
    choose = random.Random(seed)
    victim, fault = choose.randrange(RANKS), choose.choice(["kill", "stop and kill", "stop and continue"])
    with Ranks(exchange, RANKS, [ROUNDS if fault == "stop and continue" else 0, seed]) as ranks:
        for rank in range(RANKS):
            ranks.wait_for(f"ready{rank}")
        time.sleep(choose.random() * 0.1)
        if fault != "kill":
            ranks.signal(victim, signal.SIGSTOP)
            time.sleep(choose.random() * 0.1)
        if fault == "stop and continue":
            ranks.signal(victim, signal.SIGCONT)
            assert_all_good(ranks.wait(40))
            return
        killed = time.monotonic()
        ranks.signal(victim, signal.SIGKILL)
        results = ranks.wait(20)
    for result in results:
        if result.rank == victim:
            assert result.code == -signal.SIGKILL
            continue
        assert result.code == 7, str(result)
        moment, _, sentence = result.out.partition(" ")
        assert float(moment) - killed < 2, str(result)
        assert sentence.startswith(f"Rank {victim} ("), str(result)
        assert "died" in sentence, str(result)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_is_hit_is_named_by_all_others_in_time_and_nothing_is_left(seed):
    hit_at_random(seed)


@pytest.mark.full
@pytest.mark.parametrize("tens", range(2, 30))
def test_whoever_is_hit_is_named_by_all_others_in_time_every_time(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        hit_at_random(seed)


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
