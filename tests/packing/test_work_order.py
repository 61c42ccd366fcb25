"""The order of a rank's work where ranks share weights: alike on all of them, and such that nobody waits for later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.packing.work_order import LaneOrder, lockstep_order
from flowtrain_lightning.runtime.program import PADDING, make_program
from tests.packing.sizes import plan_of, sizes_strategy

RANKS = st.integers(1, 4)


@pytest.mark.parametrize(
    ("ahead", "order"), [(1, "f2 b2 f5 b5 f7 b7"), (2, "f2 f5 b2 f7 b5 b7"), (4, "f2 f5 f7 b2 b5 b7")]
)
def test_some_forwards_go_first_then_each_backward_makes_way_for_a_forward(ahead, order):
    assert " ".join(f"{kind[0]}{position}" for kind, position in lockstep_order([2, 5, 7], ahead)) == order


@given(sizes_strategy(20), RANKS, RANKS, st.integers(0, 3))
def test_encoder_ranks_that_share_weights_have_one_order_of_work(sizes, encoders, backbones, kept):
    plan = plan_of(sizes, encoders, backbones)
    shards = [RankShard(None, backbones, rank, encoders, pads_encoder_batches=True) for rank in range(encoders)]
    programs = [make_program(plan, shard, kept) for shard in shards]
    assert len({program.encoder_order for program in programs}) == 1
    for rank, program in enumerate(programs):
        real = [batch.number for batch in program.encoder_batches.values() if batch.number != PADDING]
        assert real == [number for number, media in enumerate(plan.encoder_batches[rank]) if len(media)]


@given(sizes_strategy(20), RANKS, st.integers(0, 3), st.booleans())
def test_no_turn_comes_before_what_it_waits_for(sizes, ranks, kept, trains):
    plan = plan_of(sizes, ranks, ranks)
    for rank in range(ranks):
        program = make_program(
            plan, RankShard(rank, ranks, rank, ranks, pads_microbatches=True, in_lockstep=True), kept
        )
        assert program.lane_order is not None
        left = list(program.encoder_order if trains else [w for w in program.encoder_order if w[0] == "forward"])
        forwarded, computed = [], 0
        for role in program.lane_order.order(trains):
            if role == "backbone":
                computed += 1
                assert all(position in forwarded for position in program.lane_order.encoded if position < computed)
                continue
            kind, position = left.pop(0)
            if kind == "forward":
                forwarded.append(position)
            else:
                assert position < computed, "its gradients come from that microbatch"
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
    work, lane_order = iter(lockstep_order(range(4), ahead)), LaneOrder(4, (0, 1, 2, 3), ahead)
    spelled = ["M" if role == "backbone" else next(work)[0][0].upper() for role in lane_order.order(trains=True)]
    assert "".join(spelled) == order.replace(" ", "")
