"""The order of members that share weights: alike on all of them, and such that nobody waits for later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.policies.lockstep import lockstep_order
from flowtrain_lightning.runtime.program import PADDING
from flowtrain_lightning.runtime.program_of_plan import make_program
from tests.packing.sizes import BUDGETS, RANKS, meeting_of, plan_of, shard_of, sizes_strategy


@pytest.mark.parametrize(
    ("ahead", "order"), [(1, "f2 b2 f5 b5 f7 b7"), (2, "f2 f5 b2 f7 b5 b7"), (4, "f2 f5 f7 b2 b5 b7")]
)
def test_some_forwards_go_first_then_each_backward_makes_way_for_a_forward(ahead, order):
    positions = [2, 5, 7]
    works, recomputed = lockstep_order(positions, ahead)
    assert " ".join(f"{kind[0]}{positions[number]}" for kind, number in works) == order
    assert not recomputed


@pytest.mark.parametrize(
    ("positions", "kept", "recomputed"),
    [
        ([0, 0, 0, 1], 4, set()),
        ([0, 0, 0, 0, 1, 1], 2, {2, 3}),  # the first two of position 1 find room, after those of position 0
        ([0, 1, 1, 1, 2], 2, {3}),
        ([0, 1, 1, 2], 1, {1, 2}),  # where one may be kept, none of several
    ],
)
def test_of_a_position_with_more_batches_than_may_be_kept_the_others_are_recomputed(positions, kept, recomputed):
    assert lockstep_order(positions, kept)[1] == recomputed


@given(sizes_strategy(20), RANKS, RANKS, st.integers(0, 3), BUDGETS)
def test_encoder_ranks_that_share_weights_have_one_order_of_work(sizes, encoders, backbones, kept, budget):
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget)
    shards = [
        shard_of(encoders, backbones, encoder=rank, meets={"encoder": meeting_of(encoders)}) for rank in range(encoders)
    ]
    programs = [make_program(plan, shard, kept) for shard in shards]
    assert len({program.roles["encoder"].passes for program in programs}) == 1
    for rank, program in enumerate(programs):
        real = [batch.number for batch in program.roles["encoder"].batches.values() if batch.number != PADDING]
        assert real == list(range(len(plan.batches["encoder"][rank])))
