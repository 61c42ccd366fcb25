"""Samples to microbatches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.cost import DEFAULT_COST, CostModel
from flowtrain_lightning.packing.fitting import best_fit
from flowtrain_lightning.packing.microbatches import pack_microbatches

BUDGET = 100
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=60)


def pack(lengths, ranks=1, cost=DEFAULT_COST, token_budget=BUDGET):
    return pack_microbatches(np.array(lengths, dtype=np.int64), ranks=ranks, token_budget=token_budget, cost=cost)


@given(LENGTHS, st.integers(1, 5))
def test_the_count_is_the_least_that_best_fit_finds_raised_to_a_multiple_of_the_ranks(lengths, ranks):
    count = sum(len(of_rank) for of_rank in pack(lengths, ranks))
    _, least = best_fit(np.sort(np.array(lengths, dtype=np.int64))[::-1].copy(), BUDGET, len(lengths))
    assert count % ranks == 0
    assert max(1, least) <= count < max(1, least) + ranks


def test_where_there_is_room_microbatches_cost_the_same():
    lengths = [40, 40, 20, 20, 10, 10, 30, 30]
    cost = CostModel(linear=1.0, quadratic=0.0, constant=0.0)
    assert [[sum(lengths[i] for i in m) for m in of_rank] for of_rank in pack(lengths, 3, cost)] == [[70], [70], [60]]


def test_a_long_sequence_is_balanced_by_cost_and_not_by_tokens():
    cost = CostModel(linear=0.0, quadratic=1.0, constant=0.0)
    (first,), (second,) = pack([50, 30, 30, 10, 10], ranks=2, cost=cost)
    assert first.tolist() == [0]
    assert second.tolist() == [1, 2, 3, 4]


def test_where_going_by_cost_wastes_the_room_best_fit_stands():
    ((first, second),) = pack([60, 50, 40, 30, 20])
    assert [first.tolist(), second.tolist()] == [[0, 2], [1, 3, 4]]


def test_ranks_total_alike_because_positions_are_dealt_like_a_snake():
    lengths = [100, 90, 80, 70]
    cost = CostModel(linear=1.0, quadratic=0.0, constant=0.0)
    totals = [sum(lengths[i] for members in of_rank for i in members) for of_rank in pack(lengths, 2, cost)]
    assert totals == [170, 170]


def test_more_ranks_than_samples_leaves_empty_microbatches():
    microbatches = pack([10, 20], ranks=4)
    assert [len(of_rank) for of_rank in microbatches] == [1, 1, 1, 1]
    assert [members.tolist() for (members,) in microbatches] == [[1], [0], [], []]


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_samples_make_one_empty_microbatch_on_every_rank(ranks):
    microbatches = pack([], ranks=ranks)
    assert [[len(members) for members in of_rank] for of_rank in microbatches] == [[0]] * ranks


def test_equal_samples_are_told_apart_by_index():
    assert [[m.tolist() for m in of_rank] for of_rank in pack([50] * 4, ranks=2)] == [[[0, 2]], [[1, 3]]]
