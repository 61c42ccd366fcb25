"""Which policy the members of a plan follow: what is simulated is what ranks run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.packing.policies.forwards_first import recomputed_batches
from flowtrain_lightning.packing.policies.member_orders import member_orders
from flowtrain_lightning.runtime.program_of_plan import make_program
from tests.packing.sizes import BUDGETS, RANKS, make_sizes, meeting_of, plan_of, sizes_strategy

APART = {"meet": False, "colocated": (), "in_fixed_order": False, "readers_meet": 1}


@given(sizes_strategy(20), RANKS, RANKS, st.integers(0, 3), BUDGETS)
def test_members_by_themselves_go_forward_first_and_recompute_what_would_block(
    sizes, encoders, backbones, kept, budget
):
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget)
    orders = member_orders(plan, range(encoders), kept, **APART)
    assert tuple(order.recomputed for order in orders) == recomputed_batches(plan, kept)
    assert [order.turns for order in orders] == list(plan.encoder_turns)


@given(sizes_strategy(20), RANKS, RANKS, st.integers(0, 3), BUDGETS)
def test_members_that_meet_have_one_order(sizes, encoders, backbones, kept, budget):
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget)
    assert len(set(member_orders(plan, range(encoders), kept, **APART | {"meet": True}))) == 1


def test_one_rank_of_both_roles_keeps_no_more_than_it_takes():
    plan = plan_of(make_sizes(*[(20, [10])] * 12))
    (alone,) = member_orders(plan, [0], 4, **APART | {"colocated": [0]})
    (apart,) = member_orders(plan, [0], 4, **APART)
    assert [kind for kind, _ in alone.passes[:2]] == ["forward", "backward"]
    assert [kind for kind, _ in apart.passes[:2]] == ["forward", "forward"]


@given(sizes_strategy(20), RANKS, st.integers(0, 3), BUDGETS, st.booleans(), st.booleans())
def test_a_rank_of_two_lanes_runs_its_order(sizes, ranks, kept, budget, meet, shares):
    plan = plan_of(sizes, ranks, ranks, encoder_budget=budget)
    meets = ({"encoder": meeting_of(ranks)} if meet else {}) | ({"backbone": meeting_of(ranks)} if shares else {})
    settings = {"meet": meet, "colocated": range(ranks), "in_fixed_order": meet or shares}
    settings["readers_meet"] = ranks if shares else 1
    for rank, order in enumerate(member_orders(plan, range(ranks), kept, **settings)):
        lanes = tuple((other, other) for other in range(ranks))
        program = make_program(plan, RankShard(rank, ranks, (rank,), ranks, lanes, meets=meets), kept)
        encoder = program.roles["encoder"]
        assert encoder.passes == order.passes
        assert {place for place, batch in encoder.batches.items() if batch.recomputes} == order.recomputed
