"""Reserved entries never block each other at the capacity that was named, and are refused below it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.pool import PoolError
from flowtrain_lightning.pool.address import ALIGNMENT, aligned
from flowtrain_lightning.pool.reservations import Reservation, least_held, reserve


@st.composite
def orders(draw):
    """Up to 14 entries of any size, each held until itself or one of the five after it."""
    count = draw(st.integers(0, 14))
    return [
        Reservation(draw(st.integers(1, 10 * ALIGNMENT)), min(place + draw(st.integers(0, 5)), count - 1))
        for place in range(count)
    ]


def run(order, layout, choose):
    """Put all entries while ``choose`` decides who moves next: the owner, or a reader that releases an entry.

    A reader releases an entry at the earliest when what it waits for was put. Fails when nobody can move.
    """
    ranges = [
        range(offset, offset + aligned(reservation.nbytes))
        for offset, reservation in zip(layout.offsets, order, strict=True)
    ]
    live, put = set(), 0
    while put < len(order):
        taken = [
            held for held in live if ranges[held].start < ranges[put].stop and ranges[put].start < ranges[held].stop
        ]
        moves = [held for held in live if order[held].released_after < put]
        if not taken:
            moves.append(None)
        assert moves, "the owner waits for a release that waits for the owner"
        move = choose(moves)
        if move is None:
            live.add(put)
            put += 1
        else:
            live.remove(move)


def idle_readers(moves):
    """Release only when the owner cannot go on, the latest entry first."""
    return None if None in moves else max(moves)


def hasty_readers(moves):
    """Release whatever can be released at once."""
    return next((move for move in moves if move is not None), None)


@given(orders(), st.integers(0, 1 << 30))
def test_no_timing_blocks_the_order_at_exactly_the_capacity_that_is_named(order, seed):
    layout = reserve(order)
    assert reserve(order, layout.capacity) == layout
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    for choose in (idle_readers, hasty_readers, *[random.Random(seed + n).choice for n in range(5)]):
        run(order, layout, choose)


@given(orders().filter(bool))
def test_one_byte_below_is_refused_with_the_number_that_would_do(order):
    layout = reserve(order)
    with pytest.raises(PoolError, match=f"with {layout.capacity:,} they cannot"):
        reserve(order, layout.capacity - 1)


@given(orders())
def test_no_layout_needs_less_than_what_is_held_at_one_moment(order):
    assert least_held(order) <= reserve(order).capacity <= sum(aligned(reservation.nbytes) for reservation in order)


@given(st.lists(st.integers(0, 5), max_size=14))
def test_entries_of_one_size_take_no_byte_more_than_must_be_held(waits):
    order = [Reservation(100, min(place + wait, len(waits) - 1)) for place, wait in enumerate(waits)]
    assert reserve(order).capacity == least_held(order)


@given(st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=5), min_size=1, max_size=6))
def test_entries_that_are_released_in_batches_need_the_room_of_the_largest_batch(batches):
    order, end = [], -1
    for batch in batches:
        end += len(batch)
        order += [Reservation(nbytes, end) for nbytes in batch]
    assert reserve(order).capacity == max(sum(map(aligned, batch)) for batch in batches)


def test_entries_that_wait_for_a_later_one_are_held_together_with_it():
    order = [Reservation(64, 2), Reservation(640, 1), Reservation(128, 2), Reservation(64, 3)]
    assert reserve(order).capacity == least_held(order) == 64 + 640


def test_nothing_needs_no_room():
    assert reserve([]).capacity == reserve([], 0).capacity == least_held([]) == 0
