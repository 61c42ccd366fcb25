"""Reserved entries always find their bytes: at exactly the capacity that was named, whatever the timing."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.pool import Key, MemoryRegion, PoolError, Reservation, assign_offsets
from tests.pool.test_assign_offsets import orders

START = 4096
OTHER = 7
"""The channel of entries for which nothing is reserved."""


def keyed(order, step=0):
    return {Key(0, step, item): reservation for item, reservation in enumerate(order)}


class Timing:
    """Puts orders into a region one after another, while someone decides what happens next.

    The owner puts its next entry, or one that was not reserved; a reader releases an entry, at the earliest when what
    it waits for was put. Fails when a reserved entry does not fit and nobody can release anything.
    """

    def __init__(self, region, choose, others=()):
        self.region, self.choose, self.others = region, choose, list(others)
        self.live = {}  # key -> offset and bytes; None: it is released when nothing else can be
        self.order = []
        self.put = 0

    def run(self, step, order):
        keys = keyed(order, step)
        while not self.region.reserve(keys):
            self.release(self.choose(self.releasable(step)))
        self.order, self.put = order, 0
        for key, reservation in keys.items():
            while not self.put_one(key, reservation.nbytes):
                moves = self.releasable(step)
                assert moves, "the owner waits for a release that waits for the owner"
                self.release(self.choose(moves))
            self.put += 1
            while self.others and self.choose([True, False]):
                self.put_one(Key(OTHER, step, len(self.others)), self.others.pop())
            while (moves := self.releasable(step)) and self.choose([True, False]):
                self.release(self.choose(moves))

    def put_one(self, key, nbytes):
        offset = self.region.allocate(key, nbytes)
        if offset is not None:
            assert START <= offset <= START + self.region.capacity - nbytes
            assert all(offset + nbytes <= other or other + n <= offset for other, n in self.live.values())
            self.live[key] = offset, nbytes
        return offset is not None

    def releasable(self, step):
        """What can be released without anything that is still to be put."""
        return [
            key
            for key in self.live
            if key.channel == OTHER or key.index < step or self.order[key.item].released_after < self.put
        ]

    def release(self, key):
        self.region.free(self.live.pop(key)[0])


def idle(moves):
    """Releases only when the owner cannot go on, and the latest entry first."""
    return moves[-1] if moves[-1] is not True else False


def hasty(moves):
    """Releases whatever can be released at once."""
    return moves[0]


@settings(max_examples=60)
@given(st.lists(orders(), min_size=1, max_size=3), st.integers(0, 1 << 30))
def test_no_timing_blocks_orders_at_exactly_the_capacity_that_is_named(several, seed):
    capacity = max(assign_offsets(order).capacity for order in several)
    for choose in (idle, hasty, *[random.Random(seed + n).choice for n in range(5)]):
        region = MemoryRegion(START, capacity)
        timing = Timing(region, choose)
        for step, order in enumerate(several):
            timing.run(step, order)
        for key in list(timing.live):
            timing.release(key)
        assert region.occupancy.now == 0
        assert region.fits([capacity] if capacity else []), "the region is whole again, and promised to nobody"


@given(orders(), st.integers(0, 2000), st.lists(st.integers(1, 600), max_size=30), st.integers(0, 1 << 30))
def test_entries_that_were_not_reserved_never_take_promised_bytes(order, more, others, seed):
    region = MemoryRegion(START, assign_offsets(order).capacity + more)
    Timing(region, random.Random(seed).choice, others).run(0, order)


@given(orders().filter(bool))
def test_one_byte_less_is_refused(order):
    with pytest.raises(PoolError, match="can block each other"):
        MemoryRegion(START, assign_offsets(order).capacity - 1).reserve(keyed(order))


def test_a_reserved_entry_goes_elsewhere_while_its_offset_is_taken():
    region = MemoryRegion(0, 1024)
    first, second = keyed([Reservation(512, 0), Reservation(512, 1)])
    assert region.reserve(keyed([Reservation(512, 0), Reservation(512, 1)]))
    assert region.has_room([first])
    assert region.allocate(first, 512) == 0
    assert region.has_room([second])
    assert region.allocate(second, 512) == 512


def test_entries_that_are_held_together_fit_together_or_not_at_all():
    region = MemoryRegion(0, 1024)
    keys = keyed([Reservation(512, 0), Reservation(512, 2), Reservation(512, 2)])
    first, *together = keys
    region.reserve(keys)
    region.allocate(first, 512)
    assert not region.has_room(together)
    region.free(0)
    assert region.has_room(together)


def test_a_promise_waits_for_bytes_that_are_still_taken():
    region = MemoryRegion(0, 1024)
    offset = region.allocate(Key(OTHER, 0, 0), 64)
    order = keyed([Reservation(1024, 0)])
    assert not region.reserve(order)
    region.free(offset)
    assert region.reserve(order)


def test_a_promise_ends_when_all_is_put_and_released_or_when_another_one_follows():
    region = MemoryRegion(0, 1024)
    region.reserve(keyed([Reservation(1024, 0)]))
    assert not region.fits([64])
    region.free(region.allocate(Key(0, 0, 0), 600))
    assert region.fits([1024])
    region.reserve(keyed([Reservation(1024, 0)], step=1))
    region.reserve({})
    assert region.fits([1024])


def test_entries_of_a_former_promise_are_not_overwritten():
    region = MemoryRegion(0, 1024)
    region.reserve(keyed([Reservation(512, 0)]))
    first = region.allocate(Key(0, 0, 0), 512)
    region.reserve(keyed([Reservation(512, 0)], step=1))
    second = region.allocate(Key(0, 1, 0), 512)
    assert {first, second} == {0, 512}
    region.free(first)
    region.free(second)
    assert region.fits([1024])


def test_an_entry_may_be_smaller_than_was_reserved_but_not_larger():
    region = MemoryRegion(0, 1024)
    region.reserve(keyed([Reservation(128, 1), Reservation(128, 1)]))
    assert region.allocate(Key(0, 0, 0), 64) == 0
    assert region.occupancy.now == 64
    with pytest.raises(PoolError, match="192 bytes; 128 were reserved"):
        region.allocate(Key(0, 0, 1), 192)


def test_only_what_was_reserved_can_be_asked_for():
    region = MemoryRegion(0, 1024)
    region.reserve(keyed([Reservation(128, 0)]))
    region.allocate(Key(0, 0, 0), 128)
    for key in (Key(0, 0, 0), Key(0, 0, 1)):
        with pytest.raises(PoolError, match="Nothing is reserved for Key"):
            region.has_room([key])


def test_occupancy_counts_entries_and_not_promises():
    region = MemoryRegion(0, 1024)
    region.reserve(keyed([Reservation(512, 1), Reservation(256, 1)]))
    assert (region.occupancy.now, region.occupancy.peak) == (0, 0)
    offset = region.allocate(Key(0, 0, 0), 512)
    region.free(offset)
    assert (region.occupancy.now, region.occupancy.peak, region.occupancy.capacity) == (0, 512, 1024)
