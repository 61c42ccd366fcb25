"""Steps of tokens from a stream: membership, budget, delay, resuming."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import CostModel, PackingError
from flowtrain_lightning.packing.sample_stream import StreamSettings, StreamState, usual_balance_group
from flowtrain_lightning.packing.stream_packer import StreamPacker, steps_in_block

BUDGET = 64
COST = CostModel(linear=1.0, quadratic=1.0 / 96, constant=0.0)
STREAMS = st.one_of(
    st.lists(st.integers(1, BUDGET), max_size=120),
    st.lists(st.integers(1, 6), min_size=60, max_size=250),
    st.lists(st.sampled_from([3, 3, 3, 3, 5, BUDGET]), min_size=40, max_size=160),
    st.lists(st.just(BUDGET), max_size=60),
)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.integers(0, 5))


def packer(stream, shape=(2, 2, 8, 4), state=None):
    size, groups, max_delay, lookahead = shape
    lengths = np.array(stream, dtype=np.int64)
    return StreamPacker(
        StreamSettings(
            token_budget=BUDGET,
            microbatches=groups * size,
            balance_group=size,
            cost=COST,
            max_delay=max_delay,
            lookahead=lookahead,
        ),
        lambda start, end: lengths[start:end],
        state or StreamState(),
    )


def shuffled(count, seed=0):
    generator = np.random.default_rng(seed)
    return np.minimum(generator.lognormal(1.5, 0.9, count).astype(int) + 1, BUDGET).tolist()


@settings(deadline=None, max_examples=40)
@given(STREAMS, SHAPES)
def test_every_sample_is_in_one_step_or_left_over(stream, shape):
    packing = packer(stream, shape)
    packed = [sample for step in packing for sample in step.samples.tolist()]
    assert sorted(packed + packing.left().tolist()) == list(range(len(stream)))


@settings(deadline=None, max_examples=40)
@given(STREAMS, SHAPES)
def test_no_microbatch_exceeds_the_budget_and_steps_have_equal_numbers_of_them(stream, shape):
    bins = shape[0] * shape[1]
    for step in packer(stream, shape):
        assert step.tokens.tolist() == [stream[sample] for sample in step.samples]
        assert step.bin_of.min() >= 0
        assert step.bin_of.max() < bins
        assert np.bincount(step.bin_of, step.tokens).max() <= BUDGET


@settings(deadline=None, max_examples=40)
@given(STREAMS, SHAPES)
def test_no_sample_waits_longer_than_it_may(stream, shape):
    for step in packer(stream, shape):
        assert step.delay.min() >= 0
        assert step.delay.max() <= shape[2]


@settings(deadline=None, max_examples=25)
@given(STREAMS, SHAPES, st.integers(0, 12))
def test_resuming_at_any_step_gives_the_same_steps(stream, shape, stop):
    whole = list(packer(stream, shape))
    first = packer(stream, shape)
    begun = [next(first) for _ in range(min(stop, len(whole)))]
    rest = list(packer(stream, shape, first.state))
    assert [(s.step, s.samples.tolist(), s.bin_of.tolist(), s.delay.tolist()) for s in begun + rest] == [
        (s.step, s.samples.tolist(), s.bin_of.tolist(), s.delay.tolist()) for s in whole
    ]


def test_the_state_stays_small():
    packing = packer(shuffled(20_000), (4, 4, 8, 4))
    for _ in packing:
        assert len(packing.state.waiting) <= 64


def test_without_delay_steps_follow_the_stream():
    seen = 0
    for step in packer(shuffled(2000), (2, 2, 0, 4)):
        assert step.samples.tolist() == list(range(seen, seen + len(step.samples)))
        seen += len(step.samples)


def test_less_than_one_step_is_left_over():
    stream = shuffled(3000)
    packing = packer(stream)
    list(packing)
    assert sum(stream[sample] for sample in packing.left()) <= 2 * 4 * BUDGET


def idle_share(stream, max_delay):
    """Of ranks that synchronise at every microbatch."""
    steps = packer(stream, (4, 4, max_delay, 4))
    loads = np.array([np.bincount(s.bin_of, COST.of_each(s.tokens), minlength=16).reshape(4, 4) for s in steps])
    return 1 - loads.mean(axis=2).sum() / loads.max(axis=2).sum()


def test_microbatches_of_a_group_cost_the_same_where_samples_may_wait():
    assert idle_share(shuffled(20_000), max_delay=8) < 0.01


def test_waiting_lets_outliers_share_a_group():
    generator = np.random.default_rng(0)
    stream = np.where(generator.random(20_000) < 0.002, BUDGET, generator.integers(1, 5, 20_000)).tolist()
    assert idle_share(stream, max_delay=8) < 0.5 * idle_share(stream, max_delay=0)


@pytest.mark.parametrize(
    ("max_delay", "lookahead", "steps"), [(0, 4, 1), (1, 4, 1), (4, 4, 4), (8, 4, 4), (8, 0, 1), (8, 1, 2)]
)
def test_blocks_let_a_sample_share_groups_with_as_many_steps_as_possible(max_delay, lookahead, steps):
    assert steps_in_block(max_delay, lookahead) == steps


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("balance_group", 0, "balance_group is 0; it must be at least 1"),
        ("microbatches", -1, "microbatches is -1; it must be at least 1"),
        ("microbatches", 9, "9 microbatches cannot be made of balance groups of 2; choose a balance_group that div"),
        ("token_budget", 0, "token_budget is 0"),
        ("max_delay", -1, "max_delay is -1; it must not be negative"),
        ("lookahead", -2, "lookahead is -2"),
        ("fill", 1.5, "fill is 1.5; it must be above 0 and at most 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(field, value, words):
    with pytest.raises(PackingError, match=words):
        StreamSettings(**{"token_budget": 8, "microbatches": 2, "balance_group": 2, "cost": COST, field: value})


@pytest.mark.parametrize(
    ("microbatches", "group"), [(1, 1), (2, 2), (4, 4), (6, 3), (7, 7), (8, 4), (12, 4), (32, 8), (64, 16), (100, 25)]
)
def test_a_balance_group_is_about_a_quarter_of_a_step_and_about_four_at_least(microbatches, group):
    assert usual_balance_group(microbatches) == group
