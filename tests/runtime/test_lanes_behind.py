"""The lanes of a step with a generator, run in one process: in no order of events do they block or lose a gradient."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import SampleSizes, StepPlan
from flowtrain_lightning.packing.role_graph import GENERATED, GENERATOR, graph_of
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_planner import plan_step
from tests.packing.sizes import TOKEN_BUDGET, make_sizes, sharing_strategy, sizes_strategy
from tests.runtime.interleaving import SPEC, InterleavedStep, direct_gradients, least_bytes

GRAPH = graph_of(("encoder", "backbone", GENERATOR))
RANKS = st.integers(1, 3)
BUDGETS = st.sampled_from([1, 30, 80, 10_000])
EVENTS = st.integers(0, 1 << 30)
SHARING = st.sets(st.sampled_from(GRAPH.roles))
"""Roles whose ranks share weights."""
CHANCE = st.integers(0, 1 << 30)


def drawn_of(sizes: SampleSizes, chance: int) -> SampleSizes:
    """The same sizes, with some of the media items to be generated: none, some, or all of them."""
    draw = np.random.default_rng(chance)
    drawn = draw.random(len(sizes.media_rows)) < draw.choice([0.1, 0.5, 1.0])
    content = None if sizes.media_content is None else np.where(drawn, -1, sizes.media_content)
    return replace(sizes, media_modality=np.where(drawn, GENERATED, "image"), media_content=content)


def plan_of(sizes: SampleSizes, encoders: int, backbones: int, generators: int, budget: int) -> StepPlan:
    members = StepMembers({"encoder": encoders, "backbone": backbones, GENERATOR: generators}, GRAPH)
    return plan_step(sizes, np.arange(len(sizes)), members, token_budget=TOKEN_BUDGET, encoder_budget=budget)


def check(
    plan: StepPlan,
    *,
    colocated: bool,
    kept: int,
    events: int,
    sharing: Collection[str] = (),
    trains: bool = True,
) -> InterleavedStep:
    """Runs a step in the fewest bytes that cannot block, and compares its gradients with those of one go."""
    room = least_bytes(plan, SPEC, bool(sharing), colocated)
    step = InterleavedStep(
        plan,
        colocated=colocated,
        part_bytes=room,
        kept_batches=kept,
        trains=trains,
        seed=events,
        sharing=[*sharing],
    )
    for half, expected in zip(("encoder", "backbone", GENERATOR), direct_gradients(plan), strict=True):
        expected = expected if trains or half != "encoder" else 0 * expected
        torch.testing.assert_close(step.gradient(half), expected, rtol=1e-12, atol=1e-12)
    assert all(pool.is_empty for pool in step.pools)
    return step


@pytest.mark.full
@settings(max_examples=12, deadline=None)
@given(sizes_strategy(20), CHANCE, BUDGETS, RANKS, RANKS, RANKS, st.integers(0, 4), EVENTS, st.booleans())
def test_separate_ranks_never_block_and_lose_no_gradient(
    sizes, chance, budget, encoders, backbones, generators, kept, events, trains
):
    plan = plan_of(drawn_of(sizes, chance), encoders, backbones, generators, budget)
    check(plan, colocated=False, kept=kept, events=events, trains=trains)


@settings(max_examples=12, deadline=None)
@given(sizes_strategy(20), CHANCE, BUDGETS, RANKS, RANKS, RANKS, st.integers(0, 4), EVENTS, SHARING)
def test_separate_ranks_that_share_weights_come_to_every_collective_in_one_order(
    sizes, chance, budget, encoders, backbones, generators, kept, events, sharing
):
    plan = plan_of(drawn_of(sizes, chance), encoders, backbones, generators, budget)
    check(plan, colocated=False, kept=kept, events=events, sharing=sharing)


@settings(max_examples=12, deadline=None)
@given(sizes_strategy(20), CHANCE, BUDGETS, RANKS, st.integers(0, 4), EVENTS, SHARING, st.booleans())
def test_colocated_ranks_never_block_whichever_of_their_roles_share_weights(
    sizes, chance, budget, ranks, kept, events, sharing, trains
):
    plan = plan_of(drawn_of(sizes, chance), ranks, ranks, ranks, budget)
    check(plan, colocated=True, kept=kept, events=events, sharing=sharing, trains=trains)


@pytest.mark.full
@settings(max_examples=6, deadline=None)
@given(sharing_strategy(), CHANCE, BUDGETS, RANKS, st.integers(0, 4), EVENTS, SHARING, st.booleans())
def test_what_samples_share_is_encoded_once_beside_what_is_generated(
    sizes, chance, budget, ranks, kept, events, sharing, colocated
):
    plan = plan_of(drawn_of(sizes, chance), ranks, ranks, ranks, budget)
    check(plan, colocated=colocated, kept=kept, events=events, sharing=sharing)


@pytest.mark.full
@settings(max_examples=1500, deadline=None)
@given(
    sizes_strategy(20) | sharing_strategy(),
    CHANCE,
    BUDGETS,
    RANKS,
    RANKS,
    RANKS,
    st.integers(0, 4),
    EVENTS,
    SHARING,
    st.booleans(),
    st.booleans(),
)
def test_neither_do_they_in_a_thousand_steps(
    sizes, chance, budget, encoders, backbones, generators, kept, events, sharing, colocated, trains
):
    encoders, generators = (backbones, backbones) if colocated else (encoders, generators)
    plan = plan_of(drawn_of(sizes, chance), encoders, backbones, generators, budget)
    check(plan, colocated=colocated, kept=kept, events=events, sharing=sharing, trains=trains)


def test_two_microbatches_are_open_while_others_generate():
    sizes = make_sizes(*[(60, [10])] * 6)
    sizes = replace(sizes, media_modality=np.full(6, GENERATED))
    step = check(plan_of(sizes, 1, 1, 1, 10_000), colocated=False, kept=4, events=0)
    passes = " ".join(f"{kind[0]}{number}" for kind, number in (work.split() for work in step.executed["backbone"]))
    assert passes == "f0 f1 b0 f2 b1 f3 b2 f4 b3 f5 b4 b5"


def test_gradients_are_the_same_bits_in_every_order_of_events():
    sizes = drawn_of(make_sizes(*[(10, [7, 3]), (30, []), (5, [20])] * 6), 3)
    plan = plan_of(sizes, 2, 3, 2, 30)
    found = [check(plan, colocated=False, kept=1, events=events).gradient("encoder") for events in range(10)]
    assert all(torch.equal(gradient, found[0]) for gradient in found)
