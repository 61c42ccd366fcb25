"""Processes that put reserved entries through exactly the capacity that was named; readers release late."""

import random
import time

import pytest
import torch

from flowtrain_lightning.pool import Key, Pool, PoolError, Reservation, assign_offsets, entry_nbytes
from tests.pool.ranks import join_job, lease_of, location_of, open_pool
from tests.processes import assert_all_good, run_ranks

STEPS, ENTRIES = 4, 30
TRANSPORTS = ["shared_memory", "network", "device"]


def random_order(seed):
    choose = random.Random(seed)
    return [
        Reservation(
            entry_nbytes([4 * choose.randint(1, 2000)]), min(position + choose.choice([0, 0, 1, 3]), ENTRIES - 1)
        )
        for position in range(ENTRIES)
    ]


def elements(reservation):
    return (reservation.nbytes - entry_nbytes([0])) // 4


def pass_reserved(rank, ranks, transport, seed):
    """Rank 0 puts a step's entries in their order; the others hold each as long as they may."""
    mesh = join_job(rank, ranks, **location_of(transport, rank))
    order, choose = random_order(seed), random.Random(seed * ranks + rank)
    readers = range(1, ranks)
    pool = open_pool(mesh, 0 if rank else assign_offsets(order).capacity, 0, transport)
    for step in range(STEPS):
        keys = [Key(0, step, item) for item in range(ENTRIES)]
        if rank == 0:
            while not pool.reserve(dict(zip(keys, order, strict=True))):
                assert pool.poll(50), "nothing to promise"
            for key, reservation in zip(keys, order, strict=True):
                while pool.put(key, [torch.full((elements(reservation),), float(key.item))], readers) is None:
                    assert pool.poll(50), f"{key} waits for a release that waits for it"
            continue
        leases = {}
        for position, key in enumerate(keys):
            leases[position] = lease_of(pool, key)
            time.sleep(choose.choice([0, 0, 0.001]))
            ripe = [held for held in leases if order[held].released_after <= position]
            for held in choose.sample(ripe, len(ripe)):
                lease = leases.pop(held)
                assert lease.tensors[0].eq(held).all()
                assert len(lease.tensors[0]) == elements(order[held])
                lease.release()
    while pool.counters.current.now:
        pool.poll(1.0)
    pool.close()
    mesh.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_reader_can_block_the_owner_at_exactly_the_capacity_that_was_named(transport):
    assert_all_good(run_ranks(pass_reserved, 3, arguments=[transport, 1]))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 22))
def test_no_reader_can_block_the_owner_whatever_the_order(seed):
    assert_all_good(run_ranks(pass_reserved, 2 + seed % 3, arguments=[TRANSPORTS[seed % 3], seed]))


def refused_below(rank, ranks):
    mesh = join_job(rank, ranks)
    order = dict(enumerate(random_order(0)))
    least = assign_offsets(list(order.values())).capacity
    pool = Pool.open(mesh, least - 1, 0)
    with pytest.raises(PoolError, match=f"with {least:,} they cannot"):
        pool.reserve({Key(0, 0, item): reservation for item, reservation in order.items()})
    pool.close()
    mesh.close()


def test_one_byte_less_is_refused_with_the_number_that_would_do():
    assert_all_good(run_ranks(refused_below, 1))
