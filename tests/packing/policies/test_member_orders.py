"""Which policy the members of a plan follow: what is simulated is what ranks run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.packing.policies.forwards_first import recomputed_batches
from flowtrain_lightning.packing.policies.member_orders import member_orders
from flowtrain_lightning.runtime.program_of_plan import make_program
from tests.packing.sizes import BUDGETS, RANKS, make_sizes, meeting_of, members_of, plan_of, sizes_strategy


@given(sizes_strategy(20), RANKS, RANKS, st.integers(0, 3), BUDGETS)
def test_members_by_themselves_go_forward_first_and_recompute_what_would_block(
    sizes, encoders, backbones, kept, budget
):
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget)
    orders = member_orders(plan, members_of(encoders, backbones), "encoder", kept)
    assert tuple(order.recomputed for order in orders) == recomputed_batches(plan, kept)["encoder"]
    assert [order.turns for order in orders] == list(plan.turns["encoder"])


@given(sizes_strategy(20), RANKS, RANKS, st.integers(0, 3), BUDGETS)
def test_members_that_meet_have_one_order(sizes, encoders, backbones, kept, budget):
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget)
    members = members_of(encoders, backbones, meets={"encoder": meeting_of(encoders)})
    assert len(set(member_orders(plan, members, "encoder", kept))) == 1


def test_one_rank_of_both_roles_keeps_no_more_than_it_takes():
    plan = plan_of(make_sizes(*[(20, [10])] * 12))
    (alone,) = member_orders(plan, members_of(colocated=[(0, 0)]), "encoder", 4)
    (apart,) = member_orders(plan, members_of(), "encoder", 4)
    assert [kind for kind, _ in alone.passes[:2]] == ["forward", "backward"]
    assert [kind for kind, _ in apart.passes[:2]] == ["forward", "forward"]


@given(sizes_strategy(20), RANKS, st.integers(0, 3), BUDGETS, st.booleans(), st.booleans())
def test_a_rank_of_two_lanes_runs_its_order(sizes, ranks, kept, budget, meet, shares):
    plan = plan_of(sizes, ranks, ranks, encoder_budget=budget)
    meets = ({"encoder": meeting_of(ranks)} if meet else {}) | ({"backbone": meeting_of(ranks)} if shares else {})
    members = members_of(ranks, ranks, colocated=[(rank, rank) for rank in range(ranks)], meets=meets)
    for rank, order in enumerate(member_orders(plan, members, "encoder", kept)):
        program = make_program(plan, RankShard(members, {"backbone": rank, "encoder": rank}), kept)
        encoder = program.roles["encoder"]
        assert encoder.passes == order.passes
        assert {place for place, batch in encoder.batches.items() if batch.recomputes} == order.recomputed
