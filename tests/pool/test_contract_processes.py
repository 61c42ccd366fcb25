"""What every transport promises between real processes: a death is told to all, and memory is the pool's own."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch

from flowtrain_lightning.pool import Key, PeerFailed, Pool
from tests.pool.faults import slowness
from tests.pool.ranks import join_job, labels, location_of, open_pool
from tests.processes import Ranks, assert_all_good, run_ranks


def wait_for_nothing(rank, ranks, transport):
    mesh = join_job(rank, ranks, **location_of(transport, rank))
    pool = open_pool(mesh, 1 << 16, 0, transport)
    mesh.page.enter("wait for features" if rank != 1 else "forward of encoder batch 5", 3)
    if rank == 1 and os.fork() == 0:
        time.sleep(4)  # a child that inherits all connections and outlives its parent
        os._exit(0)
    time.sleep(0.5)  # what a rank does is known on other hosts a fraction of a second later
    Path(os.environ["FOLDER"], f"ready{rank}").touch()
    try:
        while True:
            pool.poll(30)
    except PeerFailed as error:
        print(time.monotonic(), error, flush=True)
        os._exit(7)


def test_the_death_of_a_peer_wakes_all_others_with_its_name(transport):
    with Ranks(wait_for_nothing, 3, [transport]) as ranks:
        for rank in range(3):
            ranks.wait_for(f"ready{rank}")
        killed = time.monotonic()
        ranks.signal(1, signal.SIGKILL)
        results = ranks.wait(60)
    assert [result.code for result in results] == [7, -signal.SIGKILL, 7]
    for result in (results[0], results[2]):
        moment, _, sentence = result.out.partition(" ")
        assert float(moment) - killed < 2 * slowness()
        assert f"Rank 1 ({labels(3)[1]}) died" in sentence
        assert "in phase 'forward of encoder batch 5' of step 3" in sentence


def in_shared_memory():
    """The files of ``/dev/shm`` that this process has mapped or open."""
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    opened = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists the folder
            opened.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {file for file in mapped | opened if file.startswith("/dev/shm")}


def large_pool(rank, ranks):
    inherited = in_shared_memory()  # a fork has what the process before it shares: tensors of torch, semaphores
    mesh = join_job(rank, ranks)
    pool = Pool.open(mesh, 96 << 20, 0)
    if rank == 0:
        assert pool.put(Key(0, 0, 0), [torch.ones(20 << 20)], [1]) is not None
    else:
        while (lease := pool.get(Key(0, 0, 0))) is None:
            pool.poll(1.0)
        assert lease.tensors[0].sum() == 20 << 20
        lease.release()
    assert in_shared_memory() <= inherited
    while pool.counters.current.now:
        pool.poll(1.0)
    pool.close()
    mesh.close()


def test_a_pool_larger_than_a_containers_shared_memory_uses_none_of_it():
    assert_all_good(run_ranks(large_pool, 2))
