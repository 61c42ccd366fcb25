"""The lanes of a step whose encoder is in stages, run in one process: they never block, and order changes no bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import SampleSizes
from flowtrain_lightning.packing.stage_schedule import StageSchedule
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_planner import plan_step
from tests.packing.sizes import TOKEN_BUDGET, make_sizes, meeting_of, sharing_strategy, sizes_strategy
from tests.runtime.staged import StagedStep, direct_gradients
from tests.runtime.test_lanes_in_stages import BUDGETS, EVENTS, KEPT, RANKS

GIVEN = st.fixed_dictionaries(
    {
        "encoders": RANKS,
        "backbones": RANKS,
        "stages": st.integers(1, 3),
        "encoder_stages": st.integers(1, 3),
        "budget": BUDGETS,
        "colocated": st.booleans(),
        "kept": KEPT,
        "trains": st.booleans(),
        "sharing": st.booleans(),
        "encoder_sharing": st.booleans(),
        "costs": st.none() | EVENTS,
        "events": EVENTS,
    }
)


def check(
    sizes: SampleSizes,
    *,
    encoders: int = 1,
    backbones: int = 1,
    stages: int = 2,
    encoder_stages: int = 2,
    budget: int = 30,
    colocated: bool = True,
    kept: int = 1,
    trains: bool = True,
    sharing: bool = False,
    encoder_sharing: bool = False,
    costs: int | None = None,
    events: int = 0,
) -> StagedStep:
    """Runs a step in the fewest bytes that cannot block, and compares its gradients with those of one go."""
    backbones *= encoder_stages if colocated and encoder_sharing else 1  # else some ranks would only encode
    encoders = -(-stages * backbones // encoder_stages) if colocated else encoders
    costs = None if sharing or encoder_sharing else costs  # an order is searched where no rank needs another one
    both = {"backbone": StageSchedule(stages), "encoder": StageSchedule(encoder_stages)}
    pipelines = {role: pipeline for role, pipeline in both.items() if pipeline.stages > 1}
    counts, shares = {"encoder": encoders, "backbone": backbones}, {"encoder": encoder_sharing, "backbone": sharing}
    meets = {role: meeting_of(counts[role]) for role, shared in shares.items() if shared}
    members = StepMembers(counts, meets=meets, pipelines=pipelines)
    plan = plan_step(sizes, np.arange(len(sizes)), members, token_budget=TOKEN_BUDGET, encoder_budget=budget)
    how: dict[str, Any] = {"sharing": sharing, "encoder_sharing": encoder_sharing}
    how |= {"colocated": colocated, "kept_batches": kept, "trains": trains, "searched": costs, "seed": events}
    step = StagedStep(plan, both["backbone"], encoder_stages=encoder_stages, **how)
    expected = direct_gradients(plan, stages, encoder_stages)
    expected[:encoder_stages] = [each if trains else 0 * each for each in expected[:encoder_stages]]
    for found, wanted in zip(step.gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    assert all(pool.is_empty for pool in step.pools)
    return step


@settings(max_examples=12, deadline=None)
@given(sizes_strategy(16) | sharing_strategy(), GIVEN)
def test_an_encoder_in_stages_never_blocks_and_loses_no_gradient(sizes, step):
    check(sizes, **step)


@pytest.mark.full
@settings(max_examples=500, deadline=None)
@given(sizes_strategy(16) | sharing_strategy(), GIVEN)
def test_neither_does_it_in_five_hundred_steps(sizes, step):
    check(sizes, **step)


@pytest.mark.parametrize("costs", [None, 7])
def test_its_gradients_are_the_same_bits_in_every_order_of_events(costs):
    sizes = make_sizes(*[(10, [7, 3]), (30, []), (5, [20])] * 4)
    found = [check(sizes, costs=costs, events=events) for events in range(3)]
    assert all(torch.equal(*pair) for step in found for pair in zip(step.gradients, found[0].gradients, strict=True))
