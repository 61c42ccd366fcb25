"""The same steps on other ranks."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.packing import CostModel, PackingError
from flowtrain_lightning.packing.arrange import arrange
from flowtrain_lightning.packing.stream import StreamPacker, StreamSettings

BUDGET = 256
COST = CostModel(linear=1.0, quadratic=1.0 / 384, constant=0.0)


def steps():
    lengths = np.minimum(np.random.default_rng(3).lognormal(2.2, 0.8, 6000).astype(np.int64) + 1, BUDGET)
    return StreamPacker(StreamSettings(BUDGET, 8, 2, COST), lambda start, end: lengths[start:end])


def dealt(step, ranks, sync_every):
    return arrange(
        step.tokens,
        COST.of_each(step.tokens),
        step.bin_of,
        bins=16,
        width=8,
        ranks=ranks,
        budget=BUDGET,
        sync_every=sync_every,
    )


@pytest.mark.parametrize("sync_every", ["microbatch", "step"])
def test_one_two_four_and_eight_ranks_get_the_same_samples_in_every_step(sync_every):
    for step in steps():
        for ranks in (1, 2, 4, 8):
            bin_of = dealt(step, ranks, sync_every)
            assert len(bin_of) == len(step.samples)
            assert np.bincount(bin_of, step.tokens, minlength=16).max() <= BUDGET
            assert 0 <= bin_of.min() <= bin_of.max() < 16


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_meet_once_a_step_total_the_same(ranks):
    loads = np.array(
        [np.bincount(dealt(s, ranks, "step") % ranks, COST.of_each(s.tokens), minlength=ranks) for s in steps()]
    )
    assert 1 - loads.mean(axis=1).sum() / loads.max(axis=1).sum() < 0.003


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_meet_at_every_microbatch_find_rows_of_equal_cost(ranks):
    loads = np.array(
        [np.bincount(dealt(s, ranks, "microbatch"), COST.of_each(s.tokens), minlength=16) for s in steps()]
    ).reshape(-1, 16 // ranks, ranks)
    assert 1 - loads.mean(axis=2).sum() / loads.max(axis=2).sum() < 0.02


def test_ranks_that_do_not_divide_the_microbatches_are_refused():
    with pytest.raises(PackingError, match="A step of 16 microbatches cannot be dealt evenly to 3 ranks"):
        dealt(next(steps()), 3, "microbatch")
