"""The free stretches of a range of bytes: none is given twice, none is lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowtrain_lightning.pool.address import ALIGNMENT, aligned
from flowtrain_lightning.pool.memory_region import FreeList

START, NBYTES = 4096, 64 * ALIGNMENT


class FreeListUse(RuleBasedStateMachine):
    """Takes and gives back in any order, beside a plain map of which bytes are taken."""

    def __init__(self):
        super().__init__()
        self.free_list = FreeList(START, NBYTES)
        self.taken = {}

    def stretches(self):
        edges = sorted(self.taken.items())
        ends = [START, *(start + size for start, size in edges)]
        starts = [*(start for start, _ in edges), START + NBYTES]
        return [start - end for end, start in zip(ends, starts, strict=True)]

    def is_free(self, start, size):
        inside = start >= START and start + size <= START + NBYTES
        return inside and all(start + size <= other or other + n <= start for other, n in self.taken.items())

    @rule(nbytes=st.integers(0, NBYTES + ALIGNMENT))
    def take(self, nbytes):
        largest = max(self.stretches())
        start, size = self.free_list.take(nbytes), aligned(max(nbytes, 1))
        assert (start is not None) == (size <= largest), "refused exactly when no stretch is large enough"
        if start is not None:
            assert start % ALIGNMENT == 0
            assert self.is_free(start, size)
            self.taken[start] = size

    @rule(position=st.integers(0, NBYTES // ALIGNMENT), nbytes=st.integers(1, NBYTES))
    def take_at(self, position, nbytes):
        start, size = START + position * ALIGNMENT, aligned(nbytes)
        free = self.is_free(start, size)
        assert self.free_list.is_free(start, size) == free
        assert self.free_list.take_at(start, nbytes) == free
        if free:
            self.taken[start] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data):
        start = data.draw(st.sampled_from(sorted(self.taken)))
        assert self.free_list.give_back(start) == self.taken.pop(start)

    @rule(sizes=st.lists(st.integers(1, NBYTES // 2), min_size=1, max_size=4))
    def ask_whether_it_fits(self, sizes):
        fits = self.free_list.fits(sizes)
        starts = [self.free_list.take(size) for size in sizes]
        assert fits == (None not in starts)
        for start in starts:
            if start is not None:
                self.free_list.give_back(start)

    @invariant()
    def counts_what_is_taken(self):
        assert self.free_list.taken == self.taken
        assert self.free_list.largest == max(self.stretches())


TestFreeListUse = FreeListUse.TestCase
TestFreeListUse.settings = settings(max_examples=40, stateful_step_count=40)


def test_asking_whether_something_fits_leaves_no_trace():
    free_list = FreeList(0, 1024)
    assert free_list.fits([512, 512])
    assert not free_list.fits([512, 513])
    assert (free_list.taken, free_list.largest) == ({}, 1024)


def test_the_smallest_stretch_that_is_large_enough_is_used():
    free_list = FreeList(0, 1024)
    first, _, third, _ = (free_list.take(size) for size in (256, 64, 128, 64))
    free_list.give_back(first)
    free_list.give_back(third)
    assert free_list.take(128) == third


def test_bytes_are_given_back_once_only():
    free_list = FreeList(0, 1024)
    start = free_list.take(64)
    free_list.give_back(start)
    with pytest.raises(KeyError):
        free_list.give_back(start)


@pytest.mark.parametrize("nbytes", [0, 63])
def test_a_range_shorter_than_the_alignment_gives_nothing(nbytes):
    free_list = FreeList(0, nbytes)
    assert free_list.nbytes == 0
    assert free_list.take(1) is None
    assert not free_list.take_at(0, 1)
    assert not free_list.fits([1])


@settings(max_examples=30)
@given(st.integers(0, 1 << 20))
def test_the_range_is_whole_again_when_all_is_given_back(seed):
    choose = random.Random(seed)
    free_list = FreeList(0, 1 << 14)
    for _ in range(5):
        taken = []
        while (start := free_list.take(choose.randint(1, 2048))) is not None:
            taken.append(start)
        choose.shuffle(taken)
        for start in taken:
            free_list.give_back(start)
        assert free_list.largest == free_list.nbytes
