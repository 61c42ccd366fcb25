"""The lanes of a step whose backbone is in stages, run in one process: in no order of events do they block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import SampleSizes, StepPlan
from flowtrain_lightning.packing.stage_schedule import Schedule, StageSchedule
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_planner import plan_step
from tests.packing.sizes import TOKEN_BUDGET, make_sizes, meeting_of, sharing_strategy, sizes_strategy
from tests.runtime.staged import StagedStep, direct_gradients

STAGES = st.integers(2, 4)
RANKS = st.integers(1, 2)
BUDGETS = st.sampled_from([1, 30, 80, 10_000])
EVENTS = st.integers(0, 1 << 30)
KEPT = st.integers(0, 4)
PLACEMENT = st.sampled_from(["separate", "colocated", "mixed"])


def plan_of(
    sizes: SampleSizes, encoders: int, backbones: int, stages: int, budget: int, *, sharing: bool = False
) -> StepPlan:
    meets = {"backbone": meeting_of(backbones)} if sharing else {}
    pipelines = {"backbone": StageSchedule(stages)}
    members = StepMembers({"encoder": encoders, "backbone": backbones}, meets=meets, pipelines=pipelines)
    return plan_step(sizes, np.arange(len(sizes)), members, token_budget=TOKEN_BUDGET, encoder_budget=budget)


def check(
    sizes: SampleSizes,
    encoders: int,
    backbones: int,
    stages: int,
    budget: int,
    *,
    placement: str = "separate",
    virtual: int = 1,
    schedule: Schedule = "1f1b",
    sharing: bool = False,
    kept: int = 1,
    trains: bool = True,
    events: int = 0,
) -> StagedStep:
    """Runs a step in the fewest bytes that cannot block, and compares its gradients with those of one go."""
    encoders = {"separate": 0, "colocated": stages * backbones, "mixed": stages * backbones + 1}[placement] or encoders
    plan = plan_of(sizes, encoders, backbones, stages, budget, sharing=sharing)
    how = {"colocated": placement != "separate", "sharing": sharing}
    step = StagedStep(
        plan, StageSchedule(stages, virtual, schedule), kept_batches=kept, trains=trains, seed=events, **how
    )
    encoder, *of_stages = direct_gradients(plan, stages * virtual)
    expected = [encoder if trains else 0 * encoder, *of_stages]
    for found, wanted in zip(step.gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    assert all(pool.is_empty for pool in step.pools)
    return step


@settings(max_examples=15, deadline=None)
@given(sizes_strategy(20), RANKS, RANKS, STAGES, BUDGETS, KEPT, PLACEMENT, st.booleans(), st.booleans(), EVENTS)
def test_stages_never_block_and_lose_no_gradient(
    sizes, encoders, backbones, stages, budget, kept, placement, sharing, trains, events
):
    ranks = sizes, encoders, backbones, stages, budget
    check(*ranks, placement=placement, sharing=sharing, kept=kept, trains=trains, events=events)


@pytest.mark.full
@settings(max_examples=1500, deadline=None)
@given(
    sizes_strategy(20) | sharing_strategy(),
    RANKS,
    RANKS,
    STAGES,
    BUDGETS,
    KEPT,
    PLACEMENT,
    st.booleans(),
    st.booleans(),
    EVENTS,
)
def test_neither_do_they_in_a_thousand_steps(
    sizes, encoders, backbones, stages, budget, kept, placement, sharing, trains, events
):
    ranks = sizes, encoders, backbones, stages, budget
    check(*ranks, placement=placement, sharing=sharing, kept=kept, trains=trains, events=events)


@settings(max_examples=10, deadline=None)
@given(sizes_strategy(20), RANKS, RANKS, STAGES, BUDGETS, KEPT, st.integers(2, 3), st.booleans(), EVENTS)
def test_virtual_stages_never_block_either(sizes, encoders, backbones, stages, budget, kept, virtual, sharing, events):
    check(sizes, encoders, backbones, stages, budget, kept=kept, virtual=virtual, sharing=sharing, events=events)


@pytest.mark.full
@settings(max_examples=500, deadline=None)
@given(
    sizes_strategy(20) | sharing_strategy(),
    RANKS,
    RANKS,
    STAGES,
    BUDGETS,
    KEPT,
    st.integers(2, 3),
    st.booleans(),
    st.booleans(),
    EVENTS,
)
def test_neither_do_they_in_five_hundred_steps(
    sizes, encoders, backbones, stages, budget, kept, virtual, sharing, trains, events
):
    ranks = sizes, encoders, backbones, stages, budget
    check(*ranks, kept=kept, virtual=virtual, sharing=sharing, trains=trains, events=events)


SPLIT = st.sampled_from(["zb-h1", "zb-v"])


@settings(max_examples=10, deadline=None)
@given(sizes_strategy(20), RANKS, RANKS, STAGES, BUDGETS, KEPT, SPLIT, st.booleans(), EVENTS)
def test_neither_do_stages_that_split_backwards(
    sizes, encoders, backbones, stages, budget, kept, schedule, trains, events
):
    how = {"virtual": 1 + (schedule == "zb-v"), "schedule": schedule}
    check(sizes, encoders, backbones, stages, budget, kept=kept, trains=trains, events=events, **how)


@pytest.mark.full
@settings(max_examples=500, deadline=None)
@given(
    sizes_strategy(20) | sharing_strategy(),
    RANKS,
    RANKS,
    STAGES,
    BUDGETS,
    KEPT,
    SPLIT,
    PLACEMENT,
    st.booleans(),
    EVENTS,
)
def test_neither_do_they_in_five_hundred_more(
    sizes, encoders, backbones, stages, budget, kept, schedule, placement, trains, events
):
    how = {"virtual": 2, "schedule": schedule} if schedule == "zb-v" else {"schedule": schedule, "placement": placement}
    check(sizes, encoders, backbones, stages, budget, kept=kept, trains=trains, events=events, **how)


def test_each_stage_keeps_as_many_microbatches_open_as_there_are_stages_from_it_on():
    step = check(make_sizes(*[(60, [10])] * 4), 1, 1, 3, 10_000)
    orders = [" ".join(f"{work[0]}{work.split()[1]}" for work in ran["backbone"]) for ran in step.executed[:3]]
    assert orders == ["f0 f1 f2 b0 f3 b1 b2 b3", "f0 f1 b0 f2 b1 f3 b2 b3", "f0 b0 f1 b1 f2 b2 f3 b3"]


@pytest.mark.parametrize("virtual", [1, 2])
def test_fewer_microbatches_than_stages_pass_through_all_of_them(virtual):
    step = check(make_sizes((60, [10])), 1, 1, 4, 10_000, virtual=virtual)
    there, back = ([f"{kind} {place}" for place in range(virtual)] for kind in ("forward", "backward"))
    assert [list(ran["backbone"]) for ran in step.executed[:4]] == [[*there, *reversed(back)]] * 4


@pytest.mark.parametrize(
    ("virtual", "schedule"),
    [(1, "1f1b"), *(pytest.param(*each, marks=pytest.mark.full) for each in ((2, "1f1b"), (1, "zb-h1"), (2, "zb-v")))],
)
def test_gradients_are_the_same_bits_in_every_order_of_events(virtual, schedule):
    sizes = make_sizes(*[(10, [7, 3]), (30, []), (5, [20])] * 6)
    how = {"virtual": virtual, "schedule": schedule}
    found = [check(sizes, 2, 2, 3, 30, events=events, **how).gradients for events in range(10)]
    assert all(torch.equal(*pair) for step in found for pair in zip(step, found[0], strict=True))
