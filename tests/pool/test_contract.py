"""What every transport promises: shared memory, the network, both of them, and device memory."""

import gc
from bisect import bisect_right

import torch

from flowtrain_lightning.pool import WAIT_LIMITS, Key, entry_nbytes
from tests.pool.contract import CAPACITY, FLOATS, floats, now, serve
from tests.pool.ranks import lease_of, meshes, open_pool, open_pools, wait_for


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


def test_what_has_arrived_is_told_until_it_is_got(pools):
    owner, reader, _ = pools
    asked = [Key(0, 0, number) for number in (3, 1, 2)]
    assert reader.arrived(asked) == []
    for number in (1, 3):
        owner.put(Key(0, 0, number), [floats()], [1])
    wait_for(reader, lambda: len(reader.arrived(asked)) == 2)
    assert reader.arrived(asked) == [Key(0, 0, 3), Key(0, 0, 1)]
    lease_of(reader, Key(0, 0, 3)).release()
    assert reader.arrived(asked) == [Key(0, 0, 1)]


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


def test_readers_give_back_the_part_of_an_entry_that_each_has_used(pools):
    """As context-parallel ranks do, of which each needs some rows: one entry out, a part from each back."""
    owner, *readers = pools
    features = torch.arange(30.0).view(10, 3)
    owner.put(Key(0, 0, 7), [features], [1, 2])
    for part, reader in enumerate(readers):
        lease = lease_of(reader, Key(0, 0, 7))
        rows = lease.tensors[0].tensor_split(2)[part]
        reader.put(Key(1, 0, 7, part), [rows * 2], [0])
        lease.release()
    parts = [lease_of(owner, Key(1, 0, 7, part)) for part in (1, 0)]  # in whatever order
    assert torch.equal(torch.cat([parts[1].tensors[0], parts[0].tensors[0]]), features * 2)
    for lease in parts:
        lease.release()
    wait_for(owner, lambda: now(owner) == 0)


def test_entries_may_be_got_in_any_order(pools):
    owner, reader, _ = pools
    for item in range(10):
        owner.put(Key(0, 0, item), [floats(item)], [1])
    for item in (*range(9, -1, -2), *range(0, 10, 2)):
        lease = lease_of(reader, Key(0, 0, item))
        assert lease.tensors[0][0] == item
        lease.release()
    wait_for(owner, lambda: now(owner) == 0)


def test_an_entry_that_does_not_fit_changes_nothing_until_a_release_makes_it_fit(pools):
    owner, reader, _ = pools
    for item in range(4):
        assert owner.put(Key(0, 0, item), [floats(item)], [1], ahead=True) is not None
    before = owner.counters
    assert not owner.fits(FLOATS, ahead=True)
    assert owner.put(Key(0, 0, 4), [floats()], [1], ahead=True) is None
    assert owner.counters.ahead == before.ahead
    assert (owner.counters.refused, owner.counters.entries) == (1, 4)
    assert owner.fits(FLOATS), "the other region has bytes"
    lease_of(reader, Key(0, 0, 2)).release()
    wait_for(owner, lambda: owner.fits(FLOATS, ahead=True))
    assert not owner.fits([FLOATS, FLOATS], ahead=True)
    assert owner.put(Key(0, 0, 4), [floats(4)], [1], ahead=True) is not None
    assert lease_of(reader, Key(0, 0, 4)).tensors[0][0] == 4
    assert lease_of(reader, Key(0, 0, 3)).tensors[0][0] == 3


def test_exactly_what_the_helper_says_is_enough(three, transport):
    shapes, dtypes = [(33, 7), (5,)], [torch.bfloat16, torch.int64]
    owner, *_ = open_pools(three, entry_nbytes([33 * 7 * 2, 5 * 8]), 0, transport)
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    assert owner.put(Key(0, 0, 0), tensors, [1]) is not None


def test_a_larger_pool_can_replace_one_while_records_are_on_their_way(three, transport):
    first = open_pools(three, CAPACITY, 0, transport)
    first[0].put(Key(0, 0, 0), [floats(1)], [1])
    first[0].put(Key(0, 0, 1), [floats(2)], [1])
    lease = lease_of(first[1], Key(0, 0, 0))
    second = open_pools(three, 2 * CAPACITY, 0, transport)
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
    owner, reader, other = open_pools(three, CAPACITY, 0, transport)
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
    assert (counters.current.now, counters.current.peak, counters.current.capacity) == (0, 2 * FLOATS, CAPACITY)
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
        pool = open_pool(mesh, CAPACITY, 0, transport)
        pool.put(Key(0, 0, 0), [floats(2)], [0])
        lease = pool.get(Key(0, 0, 0))
        assert torch.equal(lease.tensors[0], floats(2))
        lease.release()
        assert now(pool) == 0
