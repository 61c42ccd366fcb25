"""Steps of drawn samples: filled as training fills them, or of a number of samples."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.allocator import Workload, default_allocation
from flowtrain_lightning.packing import SampleSizes
from flowtrain_lightning.placement.drawn_steps import steps_of

ALLOCATION = default_allocation(6, "separate", 2)
BUDGET = 1000


@pytest.fixture
def sizes():
    """600 samples of one picture each."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(20, 400, 600)
    return SampleSizes(tokens, tokens, np.arange(601), draw.integers(4, 200, 600), np.full(600, 4))


def steps(sizes, *, microbatches=None, samples=32, count=10):
    workload = Workload(sizes.tokens, {"image": sizes.media_patches}, samples, BUDGET)
    workload = workload if microbatches is None else workload.filling(microbatches)
    return steps_of(workload, sizes, count=count)


def test_steps_fill_their_microbatches_and_have_as_many_samples_as_the_workload_says(sizes):
    workload = Workload(sizes.tokens, {"image": sizes.media_patches}, token_budget=BUDGET).filling(16)
    plans = steps_of(workload, sizes).packed(ALLOCATION)
    assert [[len(of_rank) for of_rank in plan.microbatches] for plan in plans] == [[4] * 4] * 10
    filled = [plan.sizes.tokens.sum() / (16 * BUDGET) for plan in plans]
    assert min(filled) > 0.97
    assert np.mean([len(plan.samples) for plan in plans]) == pytest.approx(workload.global_batch_size, rel=0.05)


def test_a_sample_comes_again_when_all_have_come(sizes):
    seen = np.concatenate([plan.samples for plan in steps(sizes, microbatches=16, count=20).packed(ALLOCATION)])
    times = np.bincount(seen, minlength=600)
    assert times.max() - times.min() <= 2  # a sample may wait for others with which it fills a microbatch


def test_a_part_has_its_share_of_the_microbatches_or_of_the_samples(sizes):
    filled = steps(sizes, microbatches=32).part(8.0, 3).packed(default_allocation(2, "separate", 1))
    assert [len(plan.microbatches[0]) for plan in filled] == [4] * 3
    assert [len(plan.samples) for plan in steps(sizes).part(8.0, 3).packed(ALLOCATION)] == [4] * 3
