"""Entries that readers fetch out of their owner's memory by NIXL, over TCP on this machine."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from flowtrain_lightning.pool import Key, Pool, PoolError, address_towards, entry_nbytes
from tests.hosts import ADDRESSES, Hosts, enter, own_interfaces, why_not
from tests.pool.faults import TOLD, assert_nothing_is_left, named, slowness, told
from tests.pool.ranks import NIXL, join_job, lease_of, location_of, meshes, open_pool, open_pools, wait_for
from tests.processes import Ranks, assert_all_good, run_ranks

with_nixl = pytest.mark.skipif(NIXL.marks[0].args[0], reason=NIXL.marks[0].kwargs["reason"])
ELEMENTS = 1 << 20
CAPACITY = entry_nbytes([ELEMENTS * 4])


def test_where_nixl_is_not_installed_a_sentence_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    with meshes(2, "nixl") as made, pytest.raises(PoolError, match=r"pip install 'flowtrain-lightning\[nixl\]"):
        open_pools(made, 1 << 16, 0, "nixl")


@with_nixl
def test_within_a_host_memory_is_shared():
    with meshes(2, "shared_memory") as made:
        assert open_pools(made, 1 << 16, 0, "nixl")[0].counters.transport == "shared_memory"


@with_nixl
def test_a_pool_can_be_closed_while_entries_are_on_their_way():
    with meshes(2, "nixl") as made:
        for _ in range(3):
            owner, reader = open_pools(made, CAPACITY, 0, "nixl")
            owner.put(Key(0, 0, 0), [torch.ones(ELEMENTS)], [1])
            reader.poll(0.01)
            reader.close()
            owner.close()


def close_while_the_owner_is_stopped(rank, ranks):
    mesh = join_job(rank, ranks, **location_of("nixl", rank))
    pool = open_pool(mesh, CAPACITY, 0, "nixl")
    if rank == 1:
        pool.put(Key(0, 0, 0), [torch.ones(ELEMENTS)], [0])
        os.kill(os.getpid(), signal.SIGSTOP)
    pool.poll(1.0)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 2 * slowness()
    Path(os.environ["FOLDER"], "closed").touch()


@with_nixl
def test_a_reader_can_close_its_pool_though_the_owner_is_stopped():
    with Ranks(close_while_the_owner_is_stopped, 2) as ranks:
        ranks.wait_for("closed")
        ranks.signal(1, signal.SIGKILL)
        assert ranks.wait(20)[0].code == 0


def read_without_end(rank, ranks):
    """Rank 1 puts large entries for the others, which fetch and check them."""
    mesh = join_job(rank, ranks, **location_of("nixl", rank))
    pool = open_pool(mesh, CAPACITY * 2, 0, "nixl")
    readers = [0, 2]
    turn = 0
    try:
        while True:
            if rank == 1:
                while pool.put(Key(0, turn, 0), [torch.full((ELEMENTS,), float(turn))], readers) is None:
                    pool.poll(1.0)
            else:
                while (lease := pool.get(Key(0, turn, 0))) is None:
                    pool.poll(1.0)
                assert lease.tensors[0].eq(float(turn)).all()
                lease.release()
            turn += 1
            if turn == 2:
                Path(os.environ["FOLDER"], f"ready{rank}").touch()
    except PoolError as error:
        print(time.monotonic(), error, flush=True)
        started = time.monotonic()
        pool.close()
        assert time.monotonic() - started < 2 * slowness()
        os._exit(TOLD)


def kill_while_all_read(victim: int, seconds: float) -> None:
    """Kill a rank so long after all have begun; the others must be told, and nothing may be left."""
    with Ranks(read_without_end, 3) as ranks:
        for rank in range(3):
            ranks.wait_for(f"ready{rank}")
        time.sleep(seconds)
        killed = time.monotonic()
        ranks.signal(victim, signal.SIGKILL)
        sentences = told(ranks.wait(20), {victim}, 2.0, killed)
        assert all(sentence.startswith(f"{named(victim, 3)} died") for sentence in sentences), sentences
        assert_nothing_is_left(ranks, 3)


@with_nixl
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_readers_are_told_when_an_owner_is_killed_and_nothing_is_left(seed):
    kill_while_all_read(1, random.Random(seed).random() / 20)


@with_nixl
def test_the_others_are_told_when_a_reader_is_killed_and_nothing_is_left():
    kill_while_all_read(2, 0.0)


@with_nixl
def test_when_all_ranks_are_killed_at_once_nothing_is_left():
    with Ranks(read_without_end, 3) as ranks:
        for rank in range(3):
            ranks.wait_for(f"ready{rank}")
        for rank in range(3):
            ranks.signal(rank, signal.SIGKILL)
        ranks.wait(20)
        assert_nothing_is_left(ranks, 3)


def start_on_host(rank, ranks, job):
    """Go to a host and begin anew there: what UCX once knew of the machine it keeps, also in forked processes."""
    enter(rank, job)
    own_interfaces()
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in [str(Path(__file__).parents[3]), *sys.path] if path)
    begin = f"from {__name__} import exchange_between_hosts; exchange_between_hosts({rank}, {ranks})"
    os.execv(sys.executable, [sys.executable, "-c", begin])


def exchange_between_hosts(rank, ranks):
    mesh = join_job(rank, ranks, address=address_towards(ADDRESSES[1 - rank]))
    pool = Pool.open(mesh, 1 << 22, 0, "nixl")
    assert pool.counters.transport == "nixl"
    for turn in range(4):
        tensors = [torch.randn(20_000, generator=torch.Generator().manual_seed(10 * turn + of)) for of in range(2)]
        pool.put(Key(rank, turn, 0), [tensors[rank]], [1 - rank])
        lease = lease_of(pool, Key(1 - rank, turn, 0))
        assert torch.equal(lease.tensors[0], tensors[1 - rank])
        lease.release()
    wait_for(pool, lambda: pool.counters.current.now == 0)
    pool.close()
    mesh.close()


@pytest.mark.full
@with_nixl
def test_entries_pass_between_hosts_over_a_link_that_loses_packets():
    if reason := why_not():
        pytest.skip(f"no hosts can be made of network namespaces here: {reason}")
    with Hosts():
        assert_all_good(run_ranks(start_on_host, 2, arguments=[os.getpid()]))
