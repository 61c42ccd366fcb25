"""Samples to microbatches, and the same microbatches on other ranks."""

from __future__ import annotations

from itertools import islice, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import DEFAULT_COST, SYNC_EVERY, CostModel
from flowtrain_lightning.packing.bin_packing import best_fit
from flowtrain_lightning.packing.microbatches import arrange, pack_microbatches
from flowtrain_lightning.packing.sample_stream import StreamSettings
from flowtrain_lightning.packing.stream_packer import StreamPacker
from tests.packing.sizes import falling

BUDGET = 100
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=60)


def pack(lengths, ranks=1, cost=DEFAULT_COST, token_budget=BUDGET):
    return pack_microbatches(np.array(lengths, dtype=np.int64), ranks=ranks, token_budget=token_budget, cost=cost)


@given(LENGTHS, st.integers(1, 5))
def test_the_count_is_that_of_best_fit_raised_to_a_multiple_of_the_ranks(lengths, ranks):
    count = sum(len(of_rank) for of_rank in pack(lengths, ranks))
    _, least = best_fit(falling(lengths), BUDGET, len(lengths))
    assert count % ranks == 0
    assert max(1, least) <= count < max(1, least) + ranks


def test_where_the_budget_allows_microbatches_cost_the_same():
    lengths = [40, 40, 20, 20, 10, 10, 30, 30]
    cost = CostModel(linear=1.0, quadratic=0.0, constant=0.0)
    assert [[sum(lengths[i] for i in m) for m in of_rank] for of_rank in pack(lengths, 3, cost)] == [[70], [70], [60]]


def test_a_long_sequence_is_balanced_by_cost_and_not_by_tokens():
    cost = CostModel(linear=0.0, quadratic=1.0, constant=0.0)
    (first,), (second,) = pack([50, 30, 30, 10, 10], ranks=2, cost=cost)
    assert first.tolist() == [0]
    assert second.tolist() == [1, 2, 3, 4]


def test_where_going_by_cost_wastes_the_budget_best_fit_stands():
    ((first, second),) = pack([60, 50, 40, 30, 20])
    assert [first.tolist(), second.tolist()] == [[0, 2], [1, 3, 4]]


def test_ranks_total_alike_since_each_takes_its_turn_with_the_costliest():
    lengths = [100, 90, 80, 70]
    cost = CostModel(linear=1.0, quadratic=0.0, constant=0.0)
    totals = [sum(lengths[i] for members in of_rank for i in members) for of_rank in pack(lengths, 2, cost)]
    assert totals == [170, 170]


@pytest.mark.parametrize("sync_every", SYNC_EVERY)
@pytest.mark.parametrize("lengths", [[BUDGET], [60, 30, 10]])
def test_what_fills_one_microbatch_is_one_microbatch(lengths, sync_every):
    tokens = np.array(lengths, dtype=np.int64)
    ((only,),) = pack_microbatches(tokens, ranks=1, token_budget=BUDGET, cost=DEFAULT_COST, sync_every=sync_every)
    assert sorted(only.tolist()) == list(range(len(lengths)))


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


def time_of(microbatches, lengths, cost, sync_every):
    loads = np.array([[cost.of_each(np.array(lengths)[m]).sum() for m in of_rank] for of_rank in microbatches])
    return loads.max(axis=0).sum() if sync_every == "microbatch" else loads.sum(axis=1).max()


def best_time(lengths, positions, ranks, cost, sync_every):
    """By trying everything."""
    bins, costs = positions * ranks, cost.of_each(np.array(lengths))
    best = np.inf
    for assignment in product(range(bins), repeat=len(lengths)):
        if np.bincount(assignment, lengths, minlength=bins).max() > BUDGET:
            continue
        loads = np.bincount(assignment, costs, minlength=bins).reshape(positions, ranks)
        best = min(best, loads.max(axis=1).sum() if sync_every == "microbatch" else loads.sum(axis=0).max())
    return best


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=6), st.integers(1, 3), st.sampled_from(SYNC_EVERY))
def test_tiny_steps_are_within_one_percent_of_the_best(lengths, ranks, sync_every):
    cost = CostModel(linear=1.0, quadratic=0.01, constant=0.0)
    packed = pack_microbatches(
        np.array(lengths, dtype=np.int64), ranks=ranks, token_budget=BUDGET, cost=cost, sync_every=sync_every
    )
    positions = len(packed[0])
    if (positions * ranks) ** len(lengths) < 20_000:
        found = time_of(packed, lengths, cost, sync_every)
        assert found <= 1.01 * best_time(lengths, positions, ranks, cost, sync_every)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), st.sampled_from(SYNC_EVERY))
def test_every_sample_is_packed_once_within_the_budget(lengths, ranks, sync_every):
    packed = pack_microbatches(
        np.array(lengths, dtype=np.int64), ranks=ranks, token_budget=BUDGET, cost=DEFAULT_COST, sync_every=sync_every
    )
    members = [microbatch for of_rank in packed for microbatch in of_rank]
    assert sorted(np.concatenate(members).tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[sample] for sample in microbatch) <= BUDGET for microbatch in members)
    assert len({len(of_rank) for of_rank in packed}) == 1


def test_ranks_that_synchronise_once_a_step_total_alike_beside_an_outlier():
    lengths = [BUDGET, *np.random.default_rng(0).integers(1, 12, 120).tolist()]
    cost = CostModel(linear=1.0, quadratic=1 / 150, constant=0.0)
    packed = pack_microbatches(np.array(lengths), ranks=4, token_budget=BUDGET, cost=cost, sync_every="step")
    mean = cost.of_each(np.array(lengths)).sum() / 4
    assert time_of(packed, lengths, cost, "step") <= 1.001 * mean


STREAM_BUDGET, STREAM_COST = 256, CostModel(linear=1.0, quadratic=1.0 / 384, constant=0.0)


def stream_steps():
    lengths = np.minimum(np.random.default_rng(3).lognormal(2.2, 0.8, 6000).astype(np.int64) + 1, STREAM_BUDGET)
    settings = StreamSettings(token_budget=STREAM_BUDGET, microbatches=16, balance_group=8, cost=STREAM_COST)
    return StreamPacker(settings, lambda start, end: lengths[start:end])


def arranged(step, ranks, sync_every):
    return arrange(
        step.tokens,
        STREAM_COST.of_each(step.tokens),
        step.bin_of,
        microbatches=16,
        group_size=8,
        ranks=ranks,
        budget=STREAM_BUDGET,
        sync_every=sync_every,
    )


def idle_share(loads, axis):
    """Of ranks that wait for the costliest along an axis."""
    return 1 - loads.mean(axis=axis).sum() / loads.max(axis=axis).sum()


@pytest.mark.parametrize("sync_every", SYNC_EVERY)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 16, 20])
def test_any_number_of_ranks_gets_the_samples_of_a_step_within_the_budget(ranks, sync_every):
    for step in islice(stream_steps(), 8):
        bin_of, positions = arranged(step, ranks, sync_every)
        assert len(bin_of) == len(step.samples)
        assert np.bincount(bin_of, step.tokens).max() <= STREAM_BUDGET
        assert 0 <= bin_of.min() <= bin_of.max() < positions * ranks
        assert positions in (-(-16 // ranks), -(-16 // ranks) + 1) if 16 % ranks else positions == 16 // ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_on_any_ranks_that_synchronise_once_a_step_totals_are_alike(ranks):
    loads = [
        np.bincount(arranged(step, ranks, "step")[0] % ranks, STREAM_COST.of_each(step.tokens), minlength=ranks)
        for step in stream_steps()
    ]
    assert idle_share(np.array(loads), axis=1) < 0.003


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_on_any_ranks_that_synchronise_at_every_microbatch_positions_are_alike(ranks):
    loads = [
        np.bincount(arranged(step, ranks, "microbatch")[0], STREAM_COST.of_each(step.tokens), minlength=16)
        for step in stream_steps()
    ]
    assert idle_share(np.array(loads).reshape(-1, 16 // ranks, ranks), axis=2) < 0.02
