"""What every transport promises: shared memory, with a device or the network or alone, and one that shares nothing."""

import gc
import os
import signal
import time
from bisect import bisect_right
from pathlib import Path

import pytest
import torch

from flowtrain_lightning.pool import WAIT_LIMITS, Key, PeerFailed, PoolError, entry_room
from flowtrain_lightning.pool.record import Kind, Record
from tests.pool.faults import slowness
from tests.pool.ranks import NIXL, join_job, labels, lease_of, meshes, open_pool, open_pools, place, wait_for
from tests.processes import Ranks, assert_all_good, run_ranks

TRANSPORTS = ["shared_memory", "device", "remote", "network", "both", NIXL]
ROOM = 1 << 20
FLOATS = entry_room([1000 * 4])


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
def three(transport):
    with meshes(3, transport) as made:
        yield made


@pytest.fixture
def pools(three, transport):
    opened = open_pools(three, ROOM, 4 * FLOATS, transport)
    yield opened
    for pool in opened:
        pool.close()


def serve(pools):
    """Let every rank take in what is on its way."""
    for _ in range(3):
        for pool in pools:
            pool.poll(0.02)


def now(pool):
    return pool.counters.current.now


def floats(value=1.0):
    return torch.full((1000,), float(value))


def test_a_tuple_of_tensors_is_read_as_it_was_put(pools):
    owner, reader, _ = pools
    tensors = [
        torch.randn(7, 5, dtype=torch.bfloat16),
        torch.randn(3, 4, 2).transpose(0, 2),
        torch.arange(9).view(3, 3),
        torch.zeros(0, 16),
        torch.tensor(3.5, dtype=torch.float64),
        torch.randn(8, requires_grad=True),
    ]
    assert owner.put(Key(1, 2, 3), tensors, [1]).owner == 0
    lease = lease_of(reader, Key(1, 2, 3))
    assert (lease.key, lease.owner, len(lease.tensors)) == (Key(1, 2, 3), 0, 6)
    for tensor, expected in zip(lease.tensors, tensors, strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
    lease.release()


def test_what_is_large_arrives_whole(three, transport):
    owner, reader, _ = open_pools(three, 8 << 20, 0, transport)
    tensor = torch.randn(1 << 20)
    owner.put(Key(0, 0, 0), [tensor], [1])
    while (lease := reader.get(Key(0, 0, 0))) is None:
        owner.poll()
        reader.poll(0.01)
    assert torch.equal(lease.tensors[0], tensor)


def test_nothing_can_be_got_before_it_was_put(pools):
    assert pools[1].get(Key(0, 0, 0)) is None
    assert not pools[1].poll()
    assert not pools[1].poll(0.01)


def test_a_reader_gets_an_entry_that_was_put_for_it_only(pools):
    owner, reader, other = pools
    owner.put(Key(0, 0, 0), [floats()], [1])
    lease_of(reader, Key(0, 0, 0)).release()
    other.poll(0.1)
    assert other.get(Key(0, 0, 0)) is None


def test_an_entry_is_freed_when_all_its_readers_have_released_it(pools):
    owner, *readers = pools
    owner.put(Key(0, 0, 0), [floats(3.0)], [1, 2])
    leases = [lease_of(reader, Key(0, 0, 0)) for reader in readers]
    leases[0].release()
    serve(pools)
    assert now(owner) == FLOATS
    assert torch.equal(leases[1].tensors[0], floats(3.0))
    leases[1].release()
    wait_for(owner, lambda: now(owner) == 0)


def test_a_rank_can_read_its_own_entry_beside_others(pools):
    owner, reader, _ = pools
    owner.put(Key(0, 0, 0), [floats()], [0, 1])
    own = owner.get(Key(0, 0, 0))
    assert torch.equal(own.tensors[0], floats())
    own.release()
    assert now(owner) == FLOATS
    lease_of(reader, Key(0, 0, 0)).release()
    wait_for(owner, lambda: now(owner) == 0)


def test_entries_may_be_got_in_any_order(pools):
    owner, reader, _ = pools
    for item in range(10):
        owner.put(Key(0, 0, item), [floats(item)], [1])
        serve(pools)
    for item in (*range(9, -1, -2), *range(0, 10, 2)):
        lease = lease_of(reader, Key(0, 0, item))
        assert lease.tensors[0][0] == item
        lease.release()
    wait_for(owner, lambda: now(owner) == 0)


def test_when_there_is_no_room_nothing_changes_until_a_release_makes_some(pools):
    owner, reader, _ = pools
    for item in range(4):
        assert owner.put(Key(0, 0, item), [floats(item)], [1], ahead=True) is not None
    before = owner.counters
    assert not owner.fits(FLOATS, ahead=True)
    assert owner.put(Key(0, 0, 4), [floats()], [1], ahead=True) is None
    assert owner.counters.ahead == before.ahead
    assert (owner.counters.refused, owner.counters.entries) == (1, 4)
    assert owner.fits(FLOATS), "the other arena has room"
    lease_of(reader, Key(0, 0, 2)).release()
    wait_for(owner, lambda: owner.fits(FLOATS, ahead=True))
    assert not owner.fits([FLOATS, FLOATS], ahead=True)
    assert owner.put(Key(0, 0, 4), [floats(4)], [1], ahead=True) is not None
    assert lease_of(reader, Key(0, 0, 4)).tensors[0][0] == 4
    assert lease_of(reader, Key(0, 0, 3)).tensors[0][0] == 3


def test_what_can_never_fit_is_an_error_with_both_numbers(pools):
    with pytest.raises(PoolError, match=r"needs 4,000,192 bytes; .* has 1,048,576 bytes .* Raise `pool_bytes`"):
        pools[0].put(Key(0, 0, 0), [torch.zeros(1000, 1000)], [1])


def test_exactly_what_the_helper_says_is_enough(three, transport):
    shapes, dtypes = [(33, 7), (5,)], [torch.bfloat16, torch.int64]
    owner, *_ = open_pools(three, entry_room([33 * 7 * 2, 5 * 8]), 0, transport)
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    assert owner.put(Key(0, 0, 0), tensors, [1]) is not None


def test_a_lease_is_released_once_and_not_used_afterwards(pools):
    owner, reader, _ = pools
    owner.put(Key(0, 0, 0), [floats()], [1])
    lease = lease_of(reader, Key(0, 0, 0))
    lease.release()
    with pytest.raises(PoolError, match="released twice"):
        lease.release()
    with pytest.raises(PoolError, match="used after its release"):
        _ = lease.tensors


def test_an_entry_is_leased_once_per_rank(pools):
    owner, reader, _ = pools
    owner.put(Key(0, 0, 0), [floats()], [1])
    lease_of(reader, Key(0, 0, 0))
    with pytest.raises(PoolError, match="leased by this rank already"):
        reader.get(Key(0, 0, 0))


def test_a_stale_address_is_never_another_entrys_bytes(pools, transport):
    owner, reader, _ = pools
    stale = owner.put(Key(0, 0, 0), [floats(1)], [1])
    lease_of(reader, Key(0, 0, 0)).release()
    wait_for(owner, lambda: now(owner) == 0)
    fresh = owner.put(Key(0, 0, 1), [floats(2)], [2])
    assert (fresh.offset, fresh.owner) == (stale.offset, stale.owner), "the place is used again"
    link = owner._link
    late = Record(Kind.PUBLISH, 0, link.number, number=Key(0, 0, 0).pack(), address=stale, size=FLOATS)
    link.send(1, late)  # as if a record from before were late
    if transport in ("network", "both"):
        with pytest.raises(PoolError, match="no whole entry"):
            reader.poll(1)
        return
    reader.poll(1)
    if transport in ("shared_memory", "device", "nixl"):
        with pytest.raises(PoolError, match="is stale"):
            lease_of(reader, Key(0, 0, 0))
    else:
        assert reader.get(Key(0, 0, 0)) is None


def test_discarded_entries_are_gone_on_both_sides(pools):
    owner, reader, other = pools
    for index in range(4):
        owner.put(Key(0, index, 0), [floats(index)], [1, 2])
    owner.put(Key(1, 0, 0), [floats(9)], [1])
    lease_of(reader, Key(0, 0, 0)).release()  # its release may arrive before or after the discard
    for pool in pools:
        pool.discard(0, 3)
    serve(pools)
    assert now(owner) == 2 * FLOATS
    for pool in (reader, other):
        assert [pool.get(Key(0, index, 0)) for index in range(3)] == [None] * 3
        lease_of(pool, Key(0, 3, 0)).release()
    lease_of(reader, Key(1, 0, 0)).release()
    wait_for(owner, lambda: now(owner) == 0)
    with pytest.raises(PoolError, match="its index was discarded"):
        owner.put(Key(0, 2, 9), [floats()], [1])


def test_what_arrives_after_its_discard_is_dropped(pools):
    owner, reader, _ = pools
    reader.discard(0, 5)
    owner.put(Key(0, 4, 0), [floats()], [1])
    owner.put(Key(0, 5, 0), [floats()], [1])
    lease_of(reader, Key(0, 5, 0)).release()
    assert reader.get(Key(0, 4, 0)) is None
    wait_for(owner, lambda: now(owner) == FLOATS)
    owner.discard(0, 5)
    assert now(owner) == 0


def test_a_leased_entry_cannot_be_discarded(pools):
    owner, reader, _ = pools
    owner.put(Key(0, 1, 0), [floats()], [1])
    lease = lease_of(reader, Key(0, 1, 0))
    with pytest.raises(PoolError, match="while this rank holds a lease"):
        reader.discard(0, 2)
    lease.release()
    reader.discard(0, 2)


@pytest.mark.parametrize("readers", [[], [1, 1], [3], [-1]])
def test_readers_are_different_ranks_of_the_mesh(pools, readers):
    with pytest.raises(PoolError, match="expected different ranks below 3"):
        pools[0].put(Key(0, 0, 0), [floats()], readers)


def test_a_key_is_used_once_at_a_time(pools):
    pools[0].put(Key(0, 0, 0), [floats()], [1])
    with pytest.raises(PoolError, match="was put before"):
        pools[0].put(Key(0, 0, 0), [floats()], [1])


def test_a_larger_pool_can_take_the_place_of_one_while_records_are_on_their_way(three, transport):
    first = open_pools(three, ROOM, 0, transport)
    first[0].put(Key(0, 0, 0), [floats(1)], [1])
    first[0].put(Key(0, 0, 1), [floats(2)], [1])
    lease = lease_of(first[1], Key(0, 0, 0))
    second = open_pools(three, 2 * ROOM, 0, transport)
    lease.release()  # of the former pool: must not trouble the new one
    for pool in first:
        pool.close()
    second[0].put(Key(0, 0, 0), [floats(3)], [1])
    lease = lease_of(second[1], Key(0, 0, 0))
    assert torch.equal(lease.tensors[0], floats(3))
    lease.release()
    wait_for(second[0], lambda: now(second[0]) == 0)
    assert second[1].get(Key(0, 0, 1)) is None


def test_views_outlive_the_pool(three, transport):
    owner, reader, other = open_pools(three, ROOM, 0, transport)
    owner.put(Key(0, 0, 0), [floats(7)], [1])
    lease = lease_of(reader, Key(0, 0, 0))
    (view,) = lease.tensors
    for pool in (owner, reader, other):
        pool.close()
    lease.release()
    del lease, owner, reader, other
    gc.collect()
    assert torch.equal(view, floats(7))


def test_counters_tell_what_happened(pools, transport):
    owner, reader, _ = pools
    owner.put(Key(0, 0, 0), [floats()], [1])
    owner.put(Key(0, 0, 1), [floats()], [0, 1])
    for item in range(2):
        lease_of(reader, Key(0, 0, item)).release()
    lease_of(owner, Key(0, 0, 1)).release()
    wait_for(owner, lambda: now(owner) == 0)
    counters = owner.counters
    assert (counters.entries, counters.bytes, counters.moved_bytes) == (2, 2 * FLOATS, 2 * FLOATS)
    both = {"both": "shared_memory and network", "device": "shared_memory and device"}
    assert counters.transport == both.get(transport, transport)
    assert (counters.current.now, counters.current.peak, counters.current.capacity) == (0, 2 * FLOATS, ROOM)
    assert (counters.leased_bytes, reader.counters.leased_bytes) == (FLOATS, 2 * FLOATS)
    waited = reader.counters
    reader.poll(0.05)
    assert reader.counters.waits == waited.waits + 1
    assert reader.counters.wait_seconds >= waited.wait_seconds + 0.04
    new = [now - then for now, then in zip(reader.counters.wait_histogram, waited.wait_histogram, strict=True)]
    assert sum(new) == 1
    assert sum(new[bisect_right(WAIT_LIMITS, 0.04) :]) == 1
    assert sum(reader.counters.wait_histogram) == reader.counters.waits


def test_one_rank_alone_is_its_own_reader(transport):
    with meshes(1, transport) as (mesh,):
        pool = open_pool(mesh, ROOM, 0, transport)
        pool.put(Key(0, 0, 0), [floats(2)], [0])
        lease = pool.get(Key(0, 0, 0))
        assert torch.equal(lease.tensors[0], floats(2))
        lease.release()
        assert now(pool) == 0


def exchange(rank, ranks, transport, seed):
    """Every rank puts entries for random readers through a small pool, and checks what it reads."""
    mesh = join_job(rank, ranks, **place(transport, rank))
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


def test_processes_exchange_entries_through_a_small_pool_and_no_byte_is_wrong(transport):
    assert_all_good(run_ranks(exchange, 3, arguments=[transport, 1]))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 22))
def test_processes_exchange_entries_of_many_sizes_and_orders(transport, seed):
    assert_all_good(run_ranks(exchange, 2 + seed % 4, arguments=[transport, seed]))


def wait_for_nothing(rank, ranks, transport):
    mesh = join_job(rank, ranks, **place(transport, rank))
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
        results = ranks.wait(10)
    assert [result.code for result in results] == [7, -signal.SIGKILL, 7]
    for result in (results[0], results[2]):
        moment, _, sentence = result.out.partition(" ")
        assert float(moment) - killed < 2 * slowness()
        assert f"Rank 1 ({labels(3)[1]}) died" in sentence
        assert "in phase 'forward of encoder batch 5' of step 3" in sentence
