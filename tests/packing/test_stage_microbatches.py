"""Microbatches of a trunk in stages: enough of them, equal in number, alike in cost, the cheap ones at the ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing import DEFAULT_COST
from flowtrain_lightning.packing.sample_stream import StreamSettings
from flowtrain_lightning.packing.stage_microbatches import arrange_step, cheap_ends, pack_for_stages
from flowtrain_lightning.packing.stream_packer import StreamPacker

BUDGET = 1000


def pack(tokens, ranks, stages, sync_every="step"):
    return pack_for_stages(
        np.asarray(tokens), ranks=ranks, stages=stages, token_budget=BUDGET, cost=DEFAULT_COST, sync_every=sync_every
    )


def loads(microbatches, tokens):
    costs = DEFAULT_COST.of_each(np.asarray(tokens))
    return np.array([[costs[samples].sum() for samples in own] for own in microbatches])


@given(st.lists(st.integers(1, BUDGET), max_size=60), st.integers(1, 4), st.integers(2, 4), st.booleans())
def test_every_sample_is_in_one_of_equally_many_microbatches_within_the_budget(tokens, ranks, stages, meet):
    tokens = np.array(tokens, dtype=np.int64)
    packed = pack(tokens, ranks, stages, "microbatch" if meet else "step")
    assert len({len(own) for own in packed}) == 1
    assert sorted(np.concatenate([samples for own in packed for samples in own]).tolist()) == list(range(len(tokens)))
    assert all(tokens[samples].sum() <= BUDGET for own in packed for samples in own)


@pytest.mark.parametrize(
    ("samples", "sync_every", "wanted"), [(200, "step", 16), (200, "microbatch", 10), (20, "step", 10), (6, "step", 3)]
)
def test_stages_are_kept_busy_as_far_as_there_are_samples(samples, sync_every, wanted):
    """Two members of four stages. Those that gather weights get no more than fit; few samples are not cut."""
    tokens = np.full(samples, 100 if samples == 200 else 10)
    assert {len(own) for own in pack(tokens, 2, 4, sync_every)} == {wanted}


def test_all_microbatches_are_alike_in_cost_and_not_only_those_of_a_position():
    tokens = np.random.default_rng(0).integers(20, 400, 300)
    found = loads(pack(tokens, 2, 4), tokens)
    assert found.max() < 1.01 * found.mean()


def test_so_are_those_of_a_stream_whose_steps_have_them_already():
    settings = StreamSettings(token_budget=BUDGET, microbatches=32, balance_group=4, cost=DEFAULT_COST)
    tokens = np.random.default_rng(0).integers(20, 400, 2000)
    step = next(iter(StreamPacker(settings, lambda start, end: tokens[start:end])))
    one, staged = (
        loads(arrange_step(step, settings, DEFAULT_COST, 2, "microbatch", stages), step.tokens) for stages in (1, 4)
    )
    assert staged.shape == one.shape
    assert staged.sum() == pytest.approx(one.sum())
    assert np.ptp(staged) < 0.02 * staged.mean() < np.ptp(one)


def test_unlike_positions_come_with_the_cheapest_first_and_last():
    tokens = np.array([900, 100, 500, 300, 700])
    packed = cheap_ends((tuple(np.array([each]) for each in range(5)),), tokens, DEFAULT_COST)
    assert [tokens[samples].sum() for samples in packed[0]] == [100, 500, 900, 700, 300]


def test_like_positions_stay_as_they_are():
    microbatches = (tuple(np.array([each]) for each in range(3)),)
    assert cheap_ends(microbatches, np.array([101, 100, 102]), DEFAULT_COST) is microbatches
