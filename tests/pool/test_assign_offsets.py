"""Where reserved entries lie: apart where they must, in no more bytes than that takes, and refused in fewer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.pool import PoolError, Reservation, assign_offsets
from flowtrain_lightning.pool.address import ALIGNMENT, aligned


@st.composite
def orders(draw):
    """Up to 14 entries of any size, each held until itself or one of the five after it."""
    count = draw(st.integers(0, 14))
    return [
        Reservation(draw(st.integers(1, 10 * ALIGNMENT)), min(position + draw(st.integers(0, 5)), count - 1))
        for position in range(count)
    ]


def held_with(order, position):
    """The entry at ``position``, and those before it that may be held until it was put."""
    return [other for other in range(position) if order[other].released_after >= position] + [position]


def least_held(order):
    """Bytes that must be held at one moment under the worst timing: nothing needs less."""
    sizes = [aligned(reservation.nbytes) for reservation in order]
    return max((sum(sizes[held] for held in held_with(order, position)) for position in range(len(order))), default=0)


@given(orders())
def test_whatever_is_held_together_lies_apart(order):
    assigned = assign_offsets(order)
    ranges = [range(offset, offset + one.nbytes) for offset, one in zip(assigned.offsets, order, strict=True)]
    assert all(offset % ALIGNMENT == 0 for offset in assigned.offsets)
    assert all(lies.stop <= assigned.capacity for lies in ranges)
    for position in range(len(order)):
        for other in held_with(order, position)[:-1]:
            assert ranges[position].stop <= ranges[other].start or ranges[other].stop <= ranges[position].start


@given(orders().filter(bool))
def test_one_byte_less_is_refused_with_the_number_that_would_do(order):
    assigned = assign_offsets(order)
    assert assign_offsets(order, assigned.capacity) == assigned
    with pytest.raises(PoolError, match=f"with {assigned.capacity:,} they cannot"):
        assign_offsets(order, assigned.capacity - 1)


@settings(max_examples=50)
@given(orders())
def test_the_capacity_is_between_what_is_held_at_one_moment_and_the_sum_of_all(order):
    assert (
        least_held(order) <= assign_offsets(order).capacity <= sum(aligned(reservation.nbytes) for reservation in order)
    )


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), max_size=14))
def test_entries_of_one_size_take_no_byte_more_than_must_be_held(waits):
    order = [Reservation(100, min(position + wait, len(waits) - 1)) for position, wait in enumerate(waits)]
    assert assign_offsets(order).capacity == least_held(order)


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=5), min_size=1, max_size=6))
def test_entries_that_are_released_in_batches_need_the_bytes_of_the_largest_batch(batches):
    order, end = [], -1
    for batch in batches:
        end += len(batch)
        order += [Reservation(nbytes, end) for nbytes in batch]
    assert assign_offsets(order).capacity == max(sum(map(aligned, batch)) for batch in batches)


def test_entries_that_wait_for_a_later_one_are_held_together_with_it():
    order = [Reservation(64, 2), Reservation(640, 1), Reservation(128, 2), Reservation(64, 3)]
    assert assign_offsets(order).capacity == least_held(order) == 64 + 640


def test_nothing_needs_no_bytes():
    assert assign_offsets([]).capacity == assign_offsets([], 0).capacity == 0
