"""The turns of a rank of two roles that share weights with other ranks: nobody waits for later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.packing.policies.lockstep import lockstep_order
from flowtrain_lightning.packing.policies.taking_turns import LaneOrder
from flowtrain_lightning.runtime.program import make_program
from tests.packing.sizes import BUDGETS, RANKS, meeting_of, plan_of, sizes_strategy


@given(sizes_strategy(20), RANKS, st.integers(0, 3), st.booleans(), BUDGETS, st.booleans())
def test_no_turn_comes_before_what_it_waits_for(sizes, ranks, kept, trains, budget, pads):
    plan = plan_of(sizes, ranks, ranks, encoder_budget=budget)
    for rank in range(ranks):
        meets = {role: meeting_of(ranks) for role in ("backbone", "encoder")[: 1 + pads]}
        shard = RankShard(rank, ranks, rank, ranks, meets=meets)
        program = make_program(plan, shard, kept)
        assert program.lane_order is not None
        left = list(program.encoder_order if trains else [w for w in program.encoder_order if w[0] == "forward"])
        encoded = program.lane_order.encoded
        forwarded, computed, held = set(), 0, 0
        for role in program.lane_order.order(trains):
            if role == "backbone":
                computed += 1
                assert all(number in forwarded for number, at in enumerate(encoded) if at < computed)
                continue
            kind, number = left.pop(0)
            held += 0 if program.encoder_batches[number].recomputes else {"forward": 1, "backward": -1}[kind]
            if kind == "forward":
                forwarded.add(number)
                assert held <= kept or not trains, "no more activations are kept than may"
            else:
                assert encoded[number] < computed, "its gradients come from that microbatch"
        assert (left, computed) == ([], len(plan.microbatches[rank]))


def test_turns_without_media_are_those_of_the_backbone_alone():
    assert list(LaneOrder(3, (), 4).order(trains=True)) == ["backbone"] * 3


def test_ranks_that_encode_at_different_positions_do_so_at_the_same_time():
    """Else each microbatch, which all of them begin together, would wait for the one rank that encodes before it."""
    of_ranks = [list(LaneOrder(4, (position,), 2).order(trains=True)) for position in range(4)]
    assert of_ranks == [["encoder", *["backbone"] * 4, "encoder"]] * 4
    frozen = [list(LaneOrder(4, encoded, 1).order(trains=False)) for encoded in ((0, 1, 3), (1, 2, 3))]
    assert frozen == [["encoder"] * 3 + ["backbone"] * 4] * 2


@pytest.mark.parametrize(
    ("ahead", "order"), [(1, "F M BF M BF M BF M B"), (2, "FF M BF M BF M M BB"), (3, "FFF M M BF M M BBB")]
)
def test_beyond_the_kept_batches_a_forward_goes_one_microbatch_before_the_latest(ahead, order):
    work, lane_order = iter(lockstep_order(range(4), ahead)[0]), LaneOrder(4, (0, 1, 2, 3), ahead)
    spelled = ["M" if role == "backbone" else next(work)[0][0].upper() for role in lane_order.order(trains=True)]
    assert "".join(spelled) == order.replace(" ", "")
