"""The lanes of a step, run in one process: in no order of events do they block or lose a gradient."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.pool import PoolError
from tests.packing.sizes import make_sizes, plan_of, sharing_strategy, sizes_strategy
from tests.runtime.interleaving import SPEC, InterleavedStep, direct_gradients, least_bytes
from tests.runtime.late_copies import LateCopies

RANKS = st.integers(1, 3)
ROOM_ENOUGH = 1 << 20
SHARING = st.sampled_from([("encoder",), ("backbone",), ("encoder", "backbone")])
"""Roles whose ranks share weights."""
BUDGETS = st.sampled_from([1, 30, 80, 10_000])
"""Patches of an encoder batch: those of one media item, of some, of any number."""
EVENTS = st.integers(0, 1 << 30)
"""Seeds of an order in which ranks run and messages arrive."""


def run_step(
    plan: StepPlan,
    *,
    colocated: bool,
    kept: int,
    events: int,
    trains: bool = True,
    room: int | None = None,
    sharing: Collection[str] = (),
) -> InterleavedStep:
    """Runs a step, by default in the fewest bytes that cannot block."""
    holds_all = bool(sharing) and (colocated or plan.encoded_as is not None)
    room = least_bytes(plan, SPEC, holds_all) if room is None else room
    settings = {"colocated": colocated, "part_bytes": room, "kept_batches": kept, "sharing": sharing}
    return InterleavedStep(plan, trains=trains, seed=events, **settings)


@settings(max_examples=60)
@given(sizes_strategy(20), BUDGETS, RANKS, RANKS, st.integers(0, 4), EVENTS)
def test_separate_ranks_never_block_and_lose_no_gradient(sizes, budget, encoders, backbones, kept, events):
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget)
    check_exact(run_step(plan, colocated=False, kept=kept, events=events), plan)


@settings(max_examples=60)
@given(sizes_strategy(20), BUDGETS, RANKS, st.integers(0, 4), EVENTS)
def test_colocated_ranks_never_block_and_lose_no_gradient(sizes, budget, ranks, kept, events):
    plan = plan_of(sizes, ranks, ranks, encoder_budget=budget)
    check_exact(run_step(plan, colocated=True, kept=kept, events=events), plan)


@pytest.mark.parametrize("ranks", [2, 3])
def test_colocated_ranks_that_all_work_ahead_never_wait_for_one_another(ranks):
    plan = plan_of(make_sizes(*[(10, [7, 13]), (30, []), (5, [20]), (20, [30, 1])] * 5), ranks, ranks)
    for events in range(50):
        run_step(plan, colocated=True, kept=4, events=events)


def check_exact(step: InterleavedStep, plan: StepPlan, trains: bool = True) -> None:
    encoder, backbone, _ = direct_gradients(plan)
    torch.testing.assert_close(step.gradient("encoder"), encoder if trains else 0 * encoder, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(step.gradient("backbone"), backbone, rtol=1e-12, atol=1e-12)
    assert all(pool.is_empty for pool in step.pools)


@settings(max_examples=60)
@given(sizes_strategy(20), BUDGETS, RANKS, RANKS, st.integers(0, 4), EVENTS, SHARING, st.booleans())
def test_separate_ranks_that_share_weights_come_to_every_collective_in_one_order(
    sizes, budget, encoders, backbones, kept, events, sharing, trains
):
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget)
    step = run_step(plan, colocated=False, kept=kept, events=events, sharing=sharing, trains=trains)
    check_exact(step, plan, trains=trains)


@pytest.mark.parametrize("kept", [1, 2, 4])
@pytest.mark.parametrize("encoders", [1, 2])
def test_more_batches_for_a_position_than_are_kept_hold_up_no_ranks_that_share(encoders, kept):
    plan = plan_of(make_sizes(*[(10, [30, 30])] * 18), encoders, 3, encoder_budget=30)
    for events in range(5):
        step = run_step(plan, colocated=False, kept=kept, events=events, sharing=("backbone",))
        check_exact(step, plan)


@settings(max_examples=60)
@given(sizes_strategy(20), BUDGETS, RANKS, st.integers(0, 4), EVENTS, SHARING, st.booleans())
def test_colocated_ranks_that_share_weights_come_to_every_collective_in_one_order(
    sizes, budget, ranks, kept, events, sharing, trains
):
    plan = plan_of(sizes, ranks, ranks, encoder_budget=budget)
    step = run_step(plan, colocated=True, kept=kept, events=events, sharing=sharing, trains=trains)
    check_exact(step, plan, trains=trains)


@settings(max_examples=60)
@given(
    sizes_strategy(20),
    BUDGETS,
    RANKS,
    st.integers(1, 2),
    st.integers(0, 4),
    EVENTS,
    st.just(()) | SHARING,
    st.booleans(),
)
def test_mixed_ranks_never_block_whichever_of_them_share_weights(
    sizes, budget, backbones, only_encode, kept, events, sharing, trains
):
    plan = plan_of(sizes, backbones + only_encode, backbones, encoder_budget=budget)
    step = run_step(plan, colocated=True, kept=kept, events=events, sharing=sharing, trains=trains)
    check_exact(step, plan, trains=trains)


def check_shared(sizes, budget, encoders, backbones, kept, events, sharing, trains, colocated):
    """Media items that samples have in common are encoded once, where that fits, on ranks of all kinds."""
    encoders = max(encoders, backbones) if colocated else encoders
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget)
    step = run_step(plan, colocated=colocated, kept=kept, events=events, sharing=sharing, trains=trains)
    check_exact(step, plan, trains=trains)
    encoded = [item for of_rank in plan.batches["encoder"] for batch in of_rank for item in batch.tolist()]
    assert sorted(encoded) == plan.encoded.tolist()
    known = sizes.media_content[sizes.media_content >= 0]
    alone = int((sizes.media_content < 0).sum())
    assert len({*known.tolist()}) + alone <= len(encoded) <= len(sizes.media_content)


SHARED = given(
    sharing_strategy(),
    BUDGETS,
    RANKS,
    RANKS,
    st.integers(0, 4),
    EVENTS,
    st.just(()) | SHARING,
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=15)
@SHARED
def test_what_samples_share_is_encoded_once_and_all_readers_gradients_reach_it(
    sizes, budget, encoders, backbones, kept, events, sharing, trains, colocated
):
    check_shared(sizes, budget, encoders, backbones, kept, events, sharing, trains, colocated)


@pytest.mark.full
@settings(max_examples=1000)
@SHARED
def test_what_samples_share_is_exact_in_a_thousand_steps(
    sizes, budget, encoders, backbones, kept, events, sharing, trains, colocated
):
    check_shared(sizes, budget, encoders, backbones, kept, events, sharing, trains, colocated)


@settings(max_examples=30)
@given(sizes_strategy(20), BUDGETS, RANKS, RANKS, EVENTS)
def test_an_encoder_that_does_not_train_never_blocks_and_gets_no_gradient(sizes, budget, encoders, backbones, events):
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget)
    step = run_step(plan, colocated=False, kept=4, events=events, trains=False)
    assert all(compute.encoder.weight.grad is None for compute in step.compute)
    torch.testing.assert_close(step.gradient("backbone"), direct_gradients(plan)[1], rtol=1e-12, atol=1e-12)
    assert all(pool.is_empty for pool in step.pools)


@settings(max_examples=40)
@given(sizes_strategy(20), BUDGETS, RANKS, RANKS, st.integers(0, 3), EVENTS)
def test_no_more_activations_are_kept_than_allowed(sizes, budget, encoders, backbones, kept, events):
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget)
    step = run_step(plan, colocated=False, kept=kept, events=events, room=ROOM_ENOUGH)
    # A forward that is computed again holds its activations for the moment of its backward.
    assert max(compute.most_kept for compute in step.compute) <= kept + 1


@pytest.mark.parametrize("kept", [0, 1, 100])
def test_a_forward_runs_twice_only_where_its_activations_were_not_kept(kept):
    plan = plan_of(make_sizes(*[(20, [10])] * 12), 1, 1)
    batches = len(plan.batches["encoder"][0])
    step = run_step(plan, colocated=False, kept=kept, events=0)
    forwards = sum(compute.forwards for compute in step.compute)
    assert forwards == (2 * batches if kept == 0 else batches)


@pytest.mark.parametrize(("trains", "pads"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("colocated", [True, False])
def test_a_padding_batch_is_computed_only_where_other_ranks_need_it(colocated, trains, pads):
    plan = plan_of(make_sizes((20, [10]), (60, []), (60, [])), 2, 2)
    batches = sum(len(media) > 0 for of_rank in plan.batches["encoder"] for media in of_rank)
    positions = {entry.readers[0].number for entry in plan.entries}
    settings = {"part_bytes": ROOM_ENOUGH, "kept_batches": 4, "sharing": ["encoder"]}
    step = InterleavedStep(plan, colocated=colocated, trains=trains, seed=0, meets_in_forwards=pads, **settings)
    check_exact(step, plan, trains=trains)
    assert batches < 2 * len(positions)
    assert sum(compute.forwards for compute in step.compute) == (2 * len(positions) if trains or pads else batches)


def test_gradients_are_the_same_bits_in_every_order_of_events():
    plan = plan_of(make_sizes(*[(10, [7, 3]), (30, []), (5, [20])] * 6), 2, 3)
    found = [run_step(plan, colocated=False, kept=1, events=events).gradient("encoder") for events in range(10)]
    assert all(torch.equal(gradient, found[0]) for gradient in found)


def test_a_byte_less_than_the_least_bytes_is_refused():
    plan = plan_of(make_sizes(*[(20, [10])] * 12), 1, 1)
    with pytest.raises(PoolError, match="can block each other"):
        run_step(plan, colocated=False, kept=4, events=0, room=least_bytes(plan, SPEC) - 1)


@pytest.mark.parametrize("colocated", [True, False])
def test_what_reads_a_copy_before_it_is_there_is_noticed(colocated, monkeypatch):
    monkeypatch.setattr(LateCopies, "hand_over", lambda stream, tensors: None)
    with pytest.raises(AssertionError, match="has not waited for"):
        run_step(plan_of(make_sizes((10, [7])), 1, 1), colocated=colocated, kept=4, events=0)
