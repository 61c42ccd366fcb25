"""What every transport promises between real processes: no byte is wrong, and a death is told to all."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from flowtrain_lightning.pool import Key, PeerFailed, Pool
from tests.pool.contract import now
from tests.pool.faults import slowness
from tests.pool.ranks import join_job, labels, location_of, open_pool
from tests.processes import Ranks, assert_all_good, run_ranks


def exchange(rank, ranks, transport, seed):
    """Every rank puts entries for random readers through a small pool, and checks what it reads."""
    mesh = join_job(rank, ranks, **location_of(transport, rank))
    pool = open_pool(mesh, 1 << 18, 0, transport)
    choose = [torch.Generator().manual_seed(1000 * seed + owner) for owner in range(ranks)]

    def entry(owner):
        size = int(torch.randint(1, 8000, (1,), generator=choose[owner]))
        first = int(torch.randint(ranks, (1,), generator=choose[owner]))
        readers = sorted({first, (first + size % ranks) % ranks})
        return torch.rand(size, generator=choose[owner]), readers

    plans = [[entry(owner) for _ in range(100)] for owner in range(ranks)]
    to_put = list(enumerate(plans[rank]))
    to_read = [(owner, item) for item in range(100) for owner in range(ranks) if rank in plans[owner][item][1]]
    leases = []
    while to_put or to_read or leases or now(pool):
        busy = pool.poll()
        if to_put and pool.put(Key(rank, 0, to_put[0][0]), [to_put[0][1][0]], to_put[0][1][1]):
            busy = to_put.pop(0)
        for owner, item in list(to_read):
            if lease := pool.get(Key(owner, 0, item)):
                leases.append(lease)
                to_read.remove((owner, item))
        if leases:
            lease = leases.pop()
            assert torch.equal(lease.tensors[0], plans[lease.owner][lease.key.item][0])
            lease.release()
        elif not busy:
            pool.poll(0.2)
    assert pool.counters.entries == 100
    assert now(pool) == 0
    pool.close()
    mesh.close()


def test_processes_exchange_entries_and_no_byte_is_wrong(transport):
    assert_all_good(run_ranks(exchange, 3, arguments=[transport, 1]))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 22))
def test_processes_exchange_entries_of_many_sizes_and_orders(transport, seed):
    assert_all_good(run_ranks(exchange, 2 + seed % 4, arguments=[transport, seed]))


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
