"""What every transport refuses: a use of the pool that would lose, mix up or reread an entry."""

import pytest
import torch

from flowtrain_lightning.pool import Key, PoolError
from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from tests.pool.contract import CAPACITY, FLOATS, floats, now
from tests.pool.ranks import lease_of, open_pools, wait_for


def test_what_can_never_fit_is_an_error_with_both_numbers(pools):
    with pytest.raises(
        PoolError, match=r"needs 4,000,128 bytes; .* has 1,048,576 bytes .* Raise `PoolSettings\(bytes=...\)`"
    ):
        pools[0].put(Key(0, 0, 0), [torch.zeros(1000, 1000)], [1])


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


def test_a_stale_address_is_never_another_entrys_bytes(three, pools, transport):
    owner, reader, _ = pools
    stale = owner.put(Key(0, 0, 0), [floats(1)], [1])
    lease_of(reader, Key(0, 0, 0)).release()
    wait_for(owner, lambda: now(owner) == 0)
    fresh = owner.put(Key(0, 0, 1), [floats(2)], [2])
    assert (fresh.offset, fresh.owner) == (stale.offset, stale.owner), "its bytes are used again"
    late = ControlRecord(Kind.PUBLISH, 0, three[0].link, number=Key(0, 0, 0).pack(), address=stale, size=FLOATS)
    three[0].send(1, late)  # as if a record from before were late
    if transport in ("network", "both"):
        with pytest.raises(PoolError, match="no whole entry"):
            reader.poll(50)
        return
    reader.poll(50)
    with pytest.raises(PoolError, match="is stale"):
        lease_of(reader, Key(0, 0, 0))


@pytest.mark.parametrize("readers", [[], [1, 1], [3], [-1]])
def test_readers_are_different_ranks_of_the_mesh(pools, readers):
    with pytest.raises(PoolError, match="expected different ranks below 3"):
        pools[0].put(Key(0, 0, 0), [floats()], readers)


def test_a_key_is_used_once_at_a_time(pools):
    pools[0].put(Key(0, 0, 0), [floats()], [1])
    with pytest.raises(PoolError, match="was put before"):
        pools[0].put(Key(0, 0, 0), [floats()], [1])


def test_a_pool_that_was_replaced_cannot_be_polled(pools, three, transport):
    second = open_pools(three, CAPACITY, 0, transport)
    with pytest.raises(PoolError, match="has replaced this one"):
        pools[0].poll()
    for pool in second:
        pool.close()
