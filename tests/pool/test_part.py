"""Reserved entries always find room: at exactly the capacity that was named, whatever the timing and whatever else."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.pool import Key, PoolError, Reservation, lay_out
from flowtrain_lightning.pool.part import Part
from tests.pool.test_reservations import orders

START = 4096
OTHER = 7
"""The channel of entries for which nothing is reserved."""


def keyed(order, step=0):
    return {Key(0, step, item): reservation for item, reservation in enumerate(order)}


class Timing:
    """Puts orders into a part one after another, while someone decides what happens next.

    The owner puts its next entry, or one that was not reserved; a reader releases an entry, at the earliest when what
    it waits for was put. Fails when a reserved entry finds no room and nobody can release anything.
    """

    def __init__(self, part, choose, others=()):
        self.part, self.choose, self.others = part, choose, list(others)
        self.live = {}  # key -> offset and bytes; None: it is released when nothing else can be
        self.order = []
        self.put = 0

    def run(self, step, order):
        keys = keyed(order, step)
        while not self.part.reserve(keys):
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
        offset = self.part.allocate(key, nbytes)
        if offset is not None:
            assert START <= offset <= START + self.part.capacity - nbytes
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
        self.part.free(self.live.pop(key)[0])


def idle(moves):
    """Releases only when the owner cannot go on, and the latest entry first."""
    return moves[-1] if moves[-1] is not True else False


def hasty(moves):
    """Releases whatever can be released at once."""
    return moves[0]


@given(st.lists(orders(), min_size=1, max_size=3), st.integers(0, 1 << 30))
def test_no_timing_blocks_orders_at_exactly_the_capacity_that_is_named(several, seed):
    capacity = max(lay_out(order).capacity for order in several)
    for choose in (idle, hasty, *[random.Random(seed + n).choice for n in range(5)]):
        part = Part(START, capacity)
        timing = Timing(part, choose)
        for step, order in enumerate(several):
            timing.run(step, order)
        for key in list(timing.live):
            timing.release(key)
        assert part.occupancy.now == 0
        assert part.fits([capacity] if capacity else []), "the room is whole again, and promised to nobody"


@given(orders(), st.integers(0, 2000), st.lists(st.integers(1, 600), max_size=30), st.integers(0, 1 << 30))
def test_entries_that_were_not_reserved_never_take_promised_room(order, more, others, seed):
    part = Part(START, lay_out(order).capacity + more)
    Timing(part, random.Random(seed).choice, others).run(0, order)


@given(orders().filter(bool))
def test_one_byte_below_is_refused(order):
    with pytest.raises(PoolError, match="can block each other"):
        Part(START, lay_out(order).capacity - 1).reserve(keyed(order))


def test_a_reserved_entry_goes_beside_its_place_while_that_is_taken():
    part = Part(0, 1024)
    first, second = keyed([Reservation(512, 0), Reservation(512, 1)])
    assert part.reserve(keyed([Reservation(512, 0), Reservation(512, 1)]))
    assert part.has_room([first])
    assert part.allocate(first, 512) == 0
    assert part.has_room([second])
    assert part.allocate(second, 512) == 512


def test_entries_that_are_held_together_have_room_together_or_not_at_all():
    part = Part(0, 1024)
    keys = keyed([Reservation(512, 0), Reservation(512, 2), Reservation(512, 2)])
    first, *together = keys
    part.reserve(keys)
    part.allocate(first, 512)
    assert not part.has_room(together)
    part.free(0)
    assert part.has_room(together)


def test_a_promise_waits_for_room_that_is_still_taken():
    part = Part(0, 1024)
    offset = part.allocate(Key(OTHER, 0, 0), 64)
    order = keyed([Reservation(1024, 0)])
    assert not part.reserve(order)
    part.free(offset)
    assert part.reserve(order)


def test_a_promise_ends_when_all_is_put_and_released_or_when_another_one_follows():
    part = Part(0, 1024)
    part.reserve(keyed([Reservation(1024, 0)]))
    assert not part.fits([64])
    part.free(part.allocate(Key(0, 0, 0), 600))
    assert part.fits([1024])
    part.reserve(keyed([Reservation(1024, 0)], step=1))
    part.reserve({})
    assert part.fits([1024])


def test_what_still_lies_in_the_places_of_a_former_promise_is_not_overwritten():
    part = Part(0, 1024)
    part.reserve(keyed([Reservation(512, 0)]))
    first = part.allocate(Key(0, 0, 0), 512)
    part.reserve(keyed([Reservation(512, 0)], step=1))
    second = part.allocate(Key(0, 1, 0), 512)
    assert {first, second} == {0, 512}
    part.free(first)
    part.free(second)
    assert part.fits([1024])


def test_an_entry_may_be_smaller_than_was_reserved_but_not_larger():
    part = Part(0, 1024)
    part.reserve(keyed([Reservation(128, 1), Reservation(128, 1)]))
    assert part.allocate(Key(0, 0, 0), 64) == 0
    assert part.occupancy.now == 64
    with pytest.raises(PoolError, match="192 bytes; 128 were reserved"):
        part.allocate(Key(0, 0, 1), 192)


def test_only_what_was_reserved_can_be_asked_for():
    part = Part(0, 1024)
    part.reserve(keyed([Reservation(128, 0)]))
    part.allocate(Key(0, 0, 0), 128)
    for key in (Key(0, 0, 0), Key(0, 0, 1)):
        with pytest.raises(PoolError, match="No room is reserved for Key"):
            part.has_room([key])


def test_occupancy_counts_entries_and_not_promises():
    part = Part(0, 1024)
    part.reserve(keyed([Reservation(512, 1), Reservation(256, 1)]))
    assert (part.occupancy.now, part.occupancy.peak) == (0, 0)
    offset = part.allocate(Key(0, 0, 0), 512)
    part.free(offset)
    assert (part.occupancy.now, part.occupancy.peak, part.occupancy.capacity) == (0, 512, 1024)
