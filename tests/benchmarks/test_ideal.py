"""The ideal schedule: of small plans, worked out by hand, and of real processes, held against the clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import emulate
from benchmarks.emulation import EmulatedCost
from benchmarks.ideal import Rules, step_ends
from benchmarks.schedules import SCHEDULES
from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.packing import SampleSizes, StepPlan

COST = EmulatedCost(per_patch=3.0, per_token=3.0)
"""A patch: 1 s forward, 2 s backward. A token: 3 s."""


def plan_of(microbatches: int, backbone_ranks: int = 1, encoder_ranks: int = 1) -> StepPlan:
    """Samples of one token and one picture of one patch; one sample in each microbatch."""
    count = microbatches * backbone_ranks
    ones = np.ones(count, np.int64)
    sizes = SampleSizes(ones, ones, np.arange(count + 1), ones, ones)
    numbers = np.arange(count).reshape(microbatches, backbone_ranks)
    return StepPlan(
        samples=np.arange(count),
        sizes=sizes,
        batches={
            "backbone": tuple(tuple(numbers[i, r : r + 1] for i in range(microbatches)) for r in range(backbone_ranks)),
            "encoder": tuple(
                tuple(np.array([n]) for n in range(count) if n % encoder_ranks == r) for r in range(encoder_ranks)
            ),
        },
    )


def rules(kept_batches: int = 4, encoder_first: bool = False, colocated: bool = False) -> Rules:
    allocation = default_allocation(1) if colocated else default_allocation(2, "separate", 1)
    return Rules(allocation, COST, kept_batches, encoder_first)


def test_the_backbone_waits_for_the_first_features_only():
    assert step_ends([plan_of(3)], rules()) == [pytest.approx(1 + 3 * 3)]


def test_encoding_all_first_delays_the_backbone_by_all_forwards():
    assert step_ends([plan_of(3)], rules(encoder_first=True)) == [pytest.approx(3 + 3 * 3)]


def test_the_next_step_waits_for_the_last_backward_and_its_first_forward():
    # The last gradients come at 10 s; their backward ends at 12 s, and the next features are there at 13 s.
    assert step_ends([plan_of(3), plan_of(3)], rules()) == [pytest.approx(10), pytest.approx(13 + 9)]


def test_with_one_batch_kept_forward_waits_for_backward():
    # Forward 1 s, microbatch 3 s, backward 2 s, and from the start again.
    assert step_ends([plan_of(2)], rules(kept_batches=1)) == [pytest.approx(1 + 3 + 2 + 1 + 3)]


def test_a_colocated_rank_does_everything_one_after_another():
    ends = step_ends([plan_of(2), plan_of(2)], rules(colocated=True))
    assert ends[1] - ends[0] == pytest.approx(2 * (3 + 3))


def test_two_encoder_ranks_feed_two_backbone_ranks_at_the_same_time():
    allocation = default_allocation(4, "separate", 2)
    ends = step_ends([plan_of(3, backbone_ranks=2, encoder_ranks=2)], Rules(allocation, COST, 4))
    assert ends == [pytest.approx(1 + 3 * 3)]


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_real_ranks_take_what_the_simulation_says_to_three_percent(schedule, tmp_path, monkeypatch):
    # Long microbatches, as of a large model: what the runtime itself takes, milliseconds each, matters little.
    monkeypatch.setattr(emulate, "MICROBATCH_SECONDS", 0.4)
    job = emulate.plan_job(4, tmp_path, 3, quick=False)
    found = emulate.run_schedule(replace(job, schedule=schedule, warmup=1, folder=tmp_path / "run"))
    # Where other programs keep a rank from running, the step takes that much longer at most.
    longest = 1.03 * found["ideal_seconds"] + found["delay_seconds"]
    assert 0.97 * found["ideal_seconds"] < found["step_seconds"] < longest, found
