"""Two bins shared out anew."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing.splitting import split_evenly


def shared_out(ours, theirs, budget):
    """Loads of both bins afterwards; samples cost what they have tokens."""
    tokens = np.sort(np.array(ours + theirs, dtype=np.int64))[::-1].copy()
    left = ours.copy()
    mine = []
    for number, length in enumerate(tokens.tolist()):
        if length in left:
            left.remove(length)
            mine.append(number)
    first = np.array(mine, dtype=np.int64)
    second = np.setdiff1d(np.arange(len(tokens)), first)
    fill = np.array([sum(ours), sum(theirs)])
    gap = float(sum(ours) - sum(theirs))
    moved = split_evenly(first, second, tokens, tokens.astype(float), fill, budget, gap)
    ours_after = np.setxor1d(first, np.intersect1d(moved, first))
    ours_after = np.union1d(ours_after, np.setdiff1d(moved, first)).astype(np.int64)
    return int(tokens[ours_after].sum()), int(tokens.sum() - tokens[ours_after].sum())


def test_what_no_single_exchange_can_even_out_is_shared_out_evenly():
    assert sorted(shared_out([9, 9], [7, 6, 5], 20)) == [18, 18]


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.lists(st.integers(1, 30), max_size=5))
def test_of_few_samples_no_split_is_better(ours, theirs):
    if sum(ours) <= sum(theirs):
        return
    budget = sum(ours)
    both = np.array(ours + theirs)
    best = min(
        max(int(both[list(map(bool, side))].sum()), int(both.sum() - both[list(map(bool, side))].sum()))
        for side in product((0, 1), repeat=len(both))
    )
    assert max(shared_out(ours, theirs, budget)) == pytest.approx(best)
