"""Where reserved entries lie: as far apart as they must, in no more room than that, and refused in less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.pool import PoolError, Reservation, lay_out
from flowtrain_lightning.pool.address import ALIGNMENT, aligned


@st.composite
def orders(draw):
    """Up to 14 entries of any size, each held until itself or one of the five after it."""
    count = draw(st.integers(0, 14))
    return [
        Reservation(draw(st.integers(1, 10 * ALIGNMENT)), min(place + draw(st.integers(0, 5)), count - 1))
        for place in range(count)
    ]


def held_with(order, place):
    """The entry at ``place``, and those before it that may be held until it was put."""
    return [other for other in range(place) if order[other].released_after >= place] + [place]


def least_held(order):
    """Bytes that must be held at one moment under the worst timing: nothing needs less."""
    rooms = [aligned(reservation.nbytes) for reservation in order]
    return max((sum(rooms[held] for held in held_with(order, place)) for place in range(len(order))), default=0)


@given(orders())
def test_whatever_is_held_together_lies_apart(order):
    places = lay_out(order)
    ranges = [range(offset, offset + one.nbytes) for offset, one in zip(places.offsets, order, strict=True)]
    assert all(offset % ALIGNMENT == 0 for offset in places.offsets)
    assert all(lies.stop <= places.capacity for lies in ranges)
    for place in range(len(order)):
        for other in held_with(order, place)[:-1]:
            assert ranges[place].stop <= ranges[other].start or ranges[other].stop <= ranges[place].start


@given(orders().filter(bool))
def test_one_byte_below_is_refused_with_the_number_that_would_do(order):
    places = lay_out(order)
    assert lay_out(order, places.capacity) == places
    with pytest.raises(PoolError, match=f"with {places.capacity:,} they cannot"):
        lay_out(order, places.capacity - 1)


@given(orders())
def test_no_places_need_less_than_what_is_held_at_one_moment_nor_more_than_all(order):
    assert least_held(order) <= lay_out(order).capacity <= sum(aligned(reservation.nbytes) for reservation in order)


@given(st.lists(st.integers(0, 5), max_size=14))
def test_entries_of_one_size_take_no_byte_more_than_must_be_held(waits):
    order = [Reservation(100, min(place + wait, len(waits) - 1)) for place, wait in enumerate(waits)]
    assert lay_out(order).capacity == least_held(order)


@given(st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=5), min_size=1, max_size=6))
def test_entries_that_are_released_in_batches_need_the_room_of_the_largest_batch(batches):
    order, end = [], -1
    for batch in batches:
        end += len(batch)
        order += [Reservation(nbytes, end) for nbytes in batch]
    assert lay_out(order).capacity == max(sum(map(aligned, batch)) for batch in batches)


def test_entries_that_wait_for_a_later_one_are_held_together_with_it():
    order = [Reservation(64, 2), Reservation(640, 1), Reservation(128, 2), Reservation(64, 3)]
    assert lay_out(order).capacity == least_held(order) == 64 + 640


def test_nothing_needs_no_room():
    assert lay_out([]).capacity == lay_out([], 0).capacity == 0
