"""The part of the pool that one rank owns."""

import pytest

from flowtrain_lightning.pool import Key, PoolError
from flowtrain_lightning.pool.segment import Segment

KEY = Key(0, 0, 0)


@pytest.fixture
def segment():
    made = Segment(3, 1024, 512)
    yield made
    made.close()


def test_its_addresses_name_it_and_no_two_are_alike(segment):
    first = segment.allocate(KEY, 100, ahead=False)
    segment.free(first)
    second = segment.allocate(KEY, 100, ahead=False)
    assert (first.owner, first.offset) == (second.owner, second.offset) == (3, 0)
    assert first != second


def test_work_ahead_never_takes_the_room_of_the_step_that_runs(segment):
    assert segment.allocate(KEY, 512, ahead=True).offset == 1024
    assert segment.allocate(KEY, 1, ahead=True) is None
    assert segment.allocate(KEY, 1024, ahead=False) is not None


def test_a_stale_address_is_an_error(segment):
    address = segment.allocate(KEY, 64, ahead=True)
    segment.free(address)
    again = segment.allocate(KEY, 64, ahead=True)
    with pytest.raises(PoolError, match="is stale"):
        segment.free(address)
    segment.free(again)
    assert segment.ahead.occupancy.now == 0


def test_a_segment_may_have_no_room_at_all():
    segment = Segment(0, 0, 0)
    assert segment.allocate(KEY, 1, ahead=False) is None
    segment.close()


def test_more_than_an_address_reaches_is_refused():
    with pytest.raises(PoolError, match="an address reaches"):
        Segment(0, 1 << 37, 1)
