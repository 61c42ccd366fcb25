"""Records that are whole but untrue: an error or nothing at all, and never another entry's bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.pool import Address, Key, PoolError, Tier
from flowtrain_lightning.pool.control_records import MAX_PAYLOAD, ControlRecord, Kind
from tests.pool.ranks import NIXL, lease_of, meshes, open_pools

CAPACITY = 1 << 14
LIVING = Key(0, 0, 1)
"""An entry that rank 0 has put for rank 1, which has leased it."""


@pytest.fixture(params=["shared_memory", "network", NIXL])
def job(request):
    """Two ranks, the first of which tells lies; what it really put; and an address where nothing lies any more."""
    with meshes(2, request.param) as made:
        pools = open_pools(made, CAPACITY, 0, request.param)
        stale = pools[0].put(Key(0, 0, 0), [torch.zeros(10)], [1])
        lease_of(pools[1], Key(0, 0, 0)).release()
        while pools[0].counters.current.now:
            pools[0].poll(1.0)
        living = pools[0].put(LIVING, [torch.ones(10)], [1])
        lease = lease_of(pools[1], LIVING)
        yield made, pools, living, stale
        assert lease.tensors[0].eq(1).all()
        for pool in pools:
            pool.close()


def lies(living, stale):
    """Any record of a pool, most of whose numbers come close to true ones."""
    addresses = st.sampled_from([living, stale, Address.of(1, Tier.HOST, 0, 0), Address(living | 1 << 49)])
    numbers = st.sampled_from(
        [0, 1, 63, 64, 192, CAPACITY, CAPACITY + 1, (1 << 64) - 1, LIVING.pack(), Key(0, 0, 7).pack()]
    )
    return st.builds(
        ControlRecord,
        kind=st.sampled_from([Kind.SEGMENT, Kind.PUBLISH, Kind.RELEASE, Kind.HELLO]),
        sender=st.just(0),
        link=st.just(1),
        channel=st.sampled_from([0, 255]),
        number=numbers,
        address=st.one_of(addresses, st.integers(0, (1 << 64) - 1)),
        size=numbers.filter(lambda size: size <= 1 << 20),
        payload=st.sampled_from([b"", bytes(192), bytes(MAX_PAYLOAD)]),
        descriptors=st.just(()),
    )


@settings(max_examples=100)
@given(data=st.data())
def tell(job, data):
    (liar, _), (_, reader), living, stale = job
    record = data.draw(lies(living, stale))
    liar.send(1, record)
    key = Key.unpack(record.channel, record.number)
    try:
        arrived = reader.poll(50)
        lease = reader.get(key)
    except PoolError:
        return
    assert arrived
    assert lease is None, f"{record} was believed: {lease.tensors}"


def test_what_is_untrue_is_refused_or_without_effect(job):
    tell(job)
