"""Room within a stretch of bytes: never given twice, never lost."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowtrain_lightning.pool.address import ALIGNMENT, aligned
from flowtrain_lightning.pool.arena import Arena

START, CAPACITY = 4096, 64 * ALIGNMENT


class ArenaUse(RuleBasedStateMachine):
    """Allocates and frees in any order, beside a plain map of which bytes are taken."""

    def __init__(self):
        super().__init__()
        self.arena = Arena(START, CAPACITY)
        self.taken = {}

    def free_stretches(self):
        edges = sorted(self.taken.items())
        ends = [START, *(offset + size for offset, size in edges)]
        starts = [*(offset for offset, _ in edges), START + CAPACITY]
        return [start - end for end, start in zip(ends, starts, strict=True)]

    @rule(nbytes=st.integers(0, CAPACITY + ALIGNMENT))
    def allocate(self, nbytes):
        largest = max(self.free_stretches())
        offset = self.arena.allocate(nbytes)
        size = aligned(max(nbytes, 1))
        assert (offset is not None) == (size <= largest), "room is refused exactly when no stretch is large enough"
        if offset is not None:
            assert offset % ALIGNMENT == 0
            assert START <= offset <= START + CAPACITY - size
            assert all(offset + size <= other or other + n <= offset for other, n in self.taken.items())
            self.taken[offset] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data):
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.arena.free(offset)
        del self.taken[offset]

    @rule(sizes=st.lists(st.integers(1, CAPACITY // 2), min_size=1, max_size=4))
    def ask_whether_it_fits(self, sizes):
        fits = self.arena.fits(sizes)
        offsets = [self.arena.allocate(size) for size in sizes]
        assert fits == (None not in offsets)
        for offset in offsets:
            if offset is not None:
                self.arena.free(offset)

    @invariant()
    def counts_what_is_taken(self):
        assert self.arena.used == sum(self.taken.values())
        assert self.arena.largest_free == max(self.free_stretches())


TestArenaUse = ArenaUse.TestCase


def test_asking_whether_something_fits_leaves_no_trace():
    arena = Arena(0, 1024)
    assert arena.fits([512, 512])
    assert not arena.fits([512, 513])
    assert (arena.used, arena.largest_free) == (0, 1024)


def test_the_smallest_stretch_that_is_large_enough_is_taken():
    arena = Arena(0, 1024)
    first, _, third, _ = (arena.allocate(size) for size in (256, 64, 128, 64))
    arena.free(first)
    arena.free(third)
    assert arena.allocate(128) == third


def test_room_is_given_back_once_only():
    arena = Arena(0, 1024)
    offset = arena.allocate(64)
    arena.free(offset)
    with pytest.raises(KeyError):
        arena.free(offset)


@pytest.mark.parametrize("capacity", [0, 63])
def test_an_arena_without_room_refuses_everything(capacity):
    arena = Arena(0, capacity)
    assert arena.capacity == 0
    assert arena.allocate(1) is None
    assert not arena.fits([1])


@given(st.integers(0, 1 << 20))
def test_entries_of_one_step_after_another_never_wear_the_arena_out(seed):
    choose = random.Random(seed)
    arena = Arena(0, 1 << 16)
    for _ in range(20):
        taken = []
        while (offset := arena.allocate(choose.randint(1, 4096))) is not None:
            taken.append(offset)
        choose.shuffle(taken)
        for offset in taken:
            arena.free(offset)
        assert arena.largest_free == arena.capacity
