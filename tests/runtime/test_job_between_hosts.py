"""A run's ranks on two hosts: process groups, pool and health monitor reach all of them."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flowtrain_lightning.allocator import Allocation, Layout
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from flowtrain_lightning.pool import Key, Pool
from flowtrain_lightning.runtime.health import process_health
from flowtrain_lightning.runtime.job import Job
from tests.hosts import ADDRESSES, Hosts, enter, why_not
from tests.processes import Ranks, assert_all_good, run_ranks

ALLOCATION = Allocation(
    "separate", {"encoder": Layout(2), "backbone": Layout(2)}, {"encoder": (1, 3), "backbone": (0, 2)}
)
"""Ranks 0 and 1 run on one host, ranks 2 and 3 on the other: both roles span both hosts."""


@pytest.fixture
def hosts():
    if reason := why_not():
        pytest.skip(f"no hosts can be made of network namespaces here: {reason}")
    with Hosts() as made:
        yield made


def join(rank, ranks, tester, hang_timeout=60.0):
    host = rank // 2
    enter(host, tester)
    os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29517", GLOO_SOCKET_IFNAME=f"flow{host}")
    return Job(
        rank,
        ALLOCATION,
        process_health(),
        backend="gloo",
        hang_timeout=hang_timeout,
        timeout=timedelta(seconds=60),
        fault_folder=Path(os.environ["FOLDER"]),
        nodes=2,
    )


def take_a_step(rank, ranks, tester):
    """An encoder of each host feeds the backbone of the other; then each role and all ranks agree on a sum."""
    job = join(rank, ranks, tester)
    pool = Pool.open(job.mesh, 1 << 20, 0)
    other = 3 - rank
    if "encoder" in job.roles:
        pool.put(Key(0, 0, rank), [torch.full((50_000,), float(rank))], [other])
        while pool.counters.current.now:
            pool.poll(1.0)
    else:
        while (lease := pool.get(Key(0, 0, other))) is None:
            pool.poll(1.0)
        assert lease.tensors[0].eq(other).all()
        lease.release()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert total.item() == sum(ALLOCATION.ranks[job.roles[0]])
    assert job.groups.cross.all_reduce(torch.tensor([1.0])).item() == ranks
    pool.close()
    job.leave()
    disconnect_groups()


@pytest.mark.full
def test_a_run_on_two_hosts_passes_features_and_sums(hosts):
    assert_all_good(run_ranks(take_a_step, 4, arguments=[os.getpid()]))


def wait_for_ever(rank, ranks, tester):
    job = join(rank, ranks, tester)
    job.mesh.page.enter("forward" if rank == 3 else "wait for features", 5)
    time.sleep(1.0)  # what a rank does is known on the other host a fraction of a second later
    Path(os.environ["FOLDER"], f"ready{rank}").touch()
    time.sleep(60)


@pytest.mark.full
def test_a_rank_that_dies_ends_the_run_on_both_hosts_with_its_name(hosts):
    with Ranks(wait_for_ever, 4, [os.getpid()]) as ranks:
        for rank in range(4):
            ranks.wait_for(f"ready{rank}", 60)
        ranks.signal(3, signal.SIGKILL)
        results = ranks.wait(30)
        texts = [(ranks.folder / f"fault-rank{rank}.txt").read_text() for rank in range(3)]
    assert [result.code for result in results] == [1, 1, 1, -signal.SIGKILL]
    for text in texts:
        assert text.startswith("Rank 3 (encoder 1 on host-1) died")
        assert "in phase 'forward' of step 5" in text
