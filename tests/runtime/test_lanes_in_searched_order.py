"""The lanes of a step whose works come in one searched order, run in one process: they never block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing.stage_schedule import StageSchedule
from tests.packing.sizes import make_sizes, sharing_strategy, sizes_strategy
from tests.runtime.staged import StagedStep, direct_gradients
from tests.runtime.test_lanes_in_stages import BUDGETS, EVENTS, KEPT, PLACEMENT, RANKS, STAGES, plan_of


def check(sizes, encoders, backbones, stages, budget, placement, kept, trains, costs, events, **limit):
    """Runs a step in the fewest bytes that cannot block, and compares its gradients with those of one go."""
    encoders = {"separate": 0, "colocated": stages * backbones, "mixed": stages * backbones + 1}[placement] or encoders
    plan = plan_of(sizes, encoders, backbones, stages, budget)
    how = {"colocated": placement != "separate", "kept_batches": kept, "trains": trains, "searched": costs, **limit}
    step = StagedStep(plan, StageSchedule(stages), seed=events, **how)
    encoder, *of_stages = direct_gradients(plan, stages)
    for found, wanted in zip(step.gradients, [encoder if trains else 0 * encoder, *of_stages], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    assert all(pool.is_empty for pool in step.pools)
    return step


GIVEN = st.tuples(RANKS, RANKS, STAGES, BUDGETS, PLACEMENT, KEPT, st.booleans(), EVENTS, EVENTS)


@settings(max_examples=8, deadline=None)
@given(sizes_strategy(16) | sharing_strategy(), GIVEN)
def test_a_searched_order_never_blocks_and_loses_no_gradient(sizes, step):
    check(sizes, *step)


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(sizes_strategy(16) | sharing_strategy(), GIVEN)
def test_neither_does_it_in_three_hundred_steps(sizes, step):
    check(sizes, *step)


@pytest.mark.parametrize("room_for", [None, 1.25])
@pytest.mark.parametrize("placement", ["colocated", pytest.param("separate", marks=pytest.mark.full)])
def test_a_searched_order_gives_the_same_bits_in_every_order_of_events(placement, room_for):
    sizes, kept = make_sizes(*[(10, [7, 3]), (30, []), (5, [20])] * 4), 1 if room_for is None else 3
    found = [check(sizes, 2, 1, 2, 30, placement, kept, True, 7, events, room_for=room_for) for events in range(5)]
    assert all(torch.equal(*pair) for step in found for pair in zip(step.gradients, found[0].gradients, strict=True))
    assert all(step.executed == found[0].executed for step in found)


@pytest.mark.parametrize("room_for", [1.25, pytest.param(99.0, marks=pytest.mark.full)])
def test_batches_that_keep_nothing_or_move_what_they_keep_lose_no_gradient(room_for):
    sizes = make_sizes(*[(10, [7, 3]), (30, []), (5, [20])] * 4)
    step = check(sizes, 2, 1, 2, 30, "colocated", 9, True, 7, 0, room_for=room_for)
    batches = [batch for program in step.programs for role in program.roles.values() for batch in role.batches.values()]
    again, moved = sum(batch.recomputes for batch in batches), sum(batch.moves for batch in batches)
    assert (again > 0, moved > 0) == ((True, True) if room_for < 9 else (False, False))
    assert again + moved < len(batches)


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(sizes_strategy(16) | sharing_strategy(), GIVEN, st.sampled_from([1.0, 1.5, 3.0]))
def test_neither_do_they_in_a_hundred_steps(sizes, step, room_for):
    check(sizes, *step, room_for=room_for)
