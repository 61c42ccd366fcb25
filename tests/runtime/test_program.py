"""What a rank does in a step, worked out from the plan: its order, where features belong, what the pool must hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.compute.feature_spec import FeatureSpec
from flowtrain_lightning.data import RankShard, StepPlan
from flowtrain_lightning.packing.policies.forwards_first import forwards_first
from flowtrain_lightning.packing.role_graph import graph_of
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_planner import plan_step
from flowtrain_lightning.pool import Reservation, entry_nbytes
from flowtrain_lightning.runtime.program import StepProgram
from flowtrain_lightning.runtime.program_of_plan import make_program
from tests.packing.sizes import TOKEN_BUDGET, make_sizes, meeting_of, plan_of, shard_of, sizes_strategy

SPEC = FeatureSpec(((8,), (2, 3)), (torch.float32, torch.float64))


def nbytes(rows: int) -> int:
    return entry_nbytes([rows * 8 * 4, rows * 2 * 3 * 8])


def colocated(plan: StepPlan, rank: int = 0, kept: int = 4) -> StepProgram:
    """The program of a rank with both roles."""
    return make_program(
        plan, shard_of(len(plan.batches["encoder"]), len(plan.microbatches), encoder=rank, backbone=rank), kept
    )


def test_a_spec_tells_what_a_row_of_features_is():
    features = (torch.zeros(7, 8), torch.zeros(7, 2, 3, dtype=torch.float64))
    assert FeatureSpec.of(features) == SPEC
    assert SPEC.entry_nbytes([5, 0]) == [nbytes(5), nbytes(0)]


@pytest.mark.parametrize(
    ("kept", "recomputed", "order"),
    [
        (4, set(), "f0 f1 f2 b0 b1 b2"),
        (2, set(), "f0 f1 b0 f2 b1 b2"),
        (1, {1}, "f0 f1 b0 f2 b1 b2"),
        (0, {0, 1, 2}, "f0 f1 f2 b0 b1 b2"),
    ],
)
def test_forwards_go_first_while_activations_may_be_kept(kept, recomputed, order):
    assert " ".join(f"{kind[0]}{number}" for kind, number in forwards_first([0, 1, 2], kept, recomputed)) == order


def test_a_rank_that_is_alone_keeps_no_more_than_it_takes():
    plan = plan_of(make_sizes((10, [30]), (80, [20]), (70, [5])))
    kinds = [kind for kind, _ in colocated(plan).roles["encoder"].passes]
    assert kinds == ["forward", "backward"] * 3, "with others it would go forward first, so that these need not wait"
    apart = make_program(plan, shard_of(encoder=0), 4).roles["encoder"]
    assert [kind for kind, _ in apart.passes] == sorted(kinds)[::-1]


def test_a_rank_that_is_alone_recomputes_no_more_for_keeping_less():
    plan = plan_of(make_sizes((10, [30, 20]), (60, [20, 4, 4]), (50, [5, 30])))
    for kept in range(5):
        apart = make_program(plan, shard_of(encoder=0), kept).roles["encoder"]
        recomputed = [number for number, batch in apart.batches.items() if batch.recomputes]
        alone = colocated(plan, kept=kept).roles["encoder"].batches
        assert [number for number, batch in alone.items() if batch.recomputes] == recomputed


@given(sizes_strategy(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.sampled_from([1, 20, 10_000]))
def test_every_batch_has_one_forward_and_one_backward_and_no_more_are_kept_than_may(
    sizes, encoders, ranks, kept, budget
):
    plan = plan_of(sizes, encoders, ranks, encoder_budget=budget)
    for rank in range(encoders):
        encoder = make_program(plan, shard_of(encoders, ranks, encoder=rank), kept).roles["encoder"]
        numbers = list(range(len(plan.batches["encoder"][rank])))
        for kind in ("forward", "backward"):
            assert [number for done, number in encoder.passes if done == kind] == numbers
        held = 0
        for kind, number in encoder.passes:
            held += (kind == "forward") - (kind == "backward") if not encoder.batches[number].recomputes else 0
            assert held <= kept


@given(sizes_strategy(), st.integers(1, 3), st.integers(1, 3))
def test_the_features_of_a_microbatch_are_its_media_in_order_each_row_once(sizes, encoders, ranks):
    plan = plan_of(sizes, encoders, ranks)
    for rank in range(ranks):
        microbatches = make_program(plan, shard_of(encoders, ranks, backbone=rank), 4).roles["backbone"].batches
        filled = [number for number, samples in enumerate(plan.microbatches[rank]) if len(samples)]
        assert list(microbatches) == filled
        for microbatch in microbatches.values():
            found = np.full(microbatch.rows_read.get("image", 0), -1)
            for read in microbatch.read:
                media = plan.entries[read.entry].media
                places = np.concatenate([np.arange(part.start, part.stop) for part in read.slices])
                found[places] = np.repeat(media, plan.sizes.media_rows[media])
                assert read.maker == ("encoder", plan.entries[read.entry].maker.member)
            members = plan.microbatches[rank][microbatch.number]
            media = [m for s in members for m in range(plan.sizes.media_start[s], plan.sizes.media_start[s + 1])]
            assert found.tolist() == np.repeat(media, plan.sizes.media_rows[media]).tolist() if media else True


def test_features_of_a_batch_are_held_together_and_gradients_one_by_one():
    plan = plan_of(make_sizes((10, [30, 20]), (80, [20]), (70, [5])))
    program = colocated(plan)
    demand = program.pool_demand({"image": SPEC})
    last, expected = -1, {}
    for batch in program.roles["encoder"].batches.values():
        last += len(batch.made)
        for made in batch.made:
            expected[made.entry] = Reservation(nbytes(made.rows), last)
    assert demand.features == {"backbone": {}, "encoder": expected}
    read = [each.entry for microbatch in program.roles["backbone"].batches.values() for each in microbatch.read]
    assert demand.gradients == {
        "backbone": {
            (entry, 0): Reservation(nbytes(plan.entries[entry].rows), number) for number, entry in enumerate(read)
        }
    }


def test_the_least_bytes_are_those_of_the_largest_encoder_batch():
    plan = plan_of(make_sizes((10, [30]), (80, [20]), (70, [5])))
    assert [len(batch) for batch in plan.batches["encoder"][0]] == [1, 1, 1]
    demand = colocated(plan).pool_demand({"image": SPEC})
    assert (demand.least, demand.ample) == (nbytes(30), sum(map(nbytes, (30, 20, 5))))


@given(sizes_strategy(20), st.integers(1, 6))
def test_ranks_that_take_turns_have_bytes_for_what_each_puts_however_many_they_are(sizes, ranks):
    plan = plan_of(sizes, ranks, ranks)
    meets = {role: meeting_of(ranks) for role in ("encoder", "backbone")}
    shards = [shard_of(ranks, ranks, encoder=rank, backbone=rank, meets=meets) for rank in range(ranks)]
    demands = [make_program(plan, shard, 2).pool_demand({"image": SPEC}) for shard in shards]
    put = [sum(each.nbytes for each in of_role.values()) for demand in demands for of_role in demand.features.values()]
    given_back = [sum(each.nbytes for each in demand.gradients["backbone"].values()) for demand in demands]
    assert {demand.least for demand in demands} == {max(put + given_back)}


def test_a_step_without_media_asks_nothing_of_the_pool():
    demand = colocated(plan_of(make_sizes((10, []), (80, [])))).pool_demand({"image": SPEC})
    assert (demand.least, demand.ample, demand.gradients) == (0, 0, {"backbone": {}})
    assert not any(demand.features.values())


@given(sizes_strategy(), st.integers(1, 4), st.integers(1, 4))
def test_the_least_is_never_more_than_ample_and_that_never_more_than_everything(sizes, encoders, backbones):
    plan = plan_of(sizes, encoders, backbones)
    demand = make_program(plan, shard_of(encoders, backbones, encoder=0), 4).pool_demand({"image": SPEC})
    assert demand.least <= demand.ample <= sum(nbytes(entry.rows) for entry in plan.entries)


NAMES = ("encoder_image", "encoder_audio")
TWO_ENCODERS = graph_of((*NAMES, "backbone"))


def test_each_modality_of_a_microbatch_has_rows_of_its_own():
    sizes = replace(make_sizes((5, [2, 3, 4]), (5, [6])), media_modality=np.array(["image", "audio", "image", "audio"]))
    members = StepMembers(dict.fromkeys(TWO_ENCODERS.roles, 1), TWO_ENCODERS)
    plan = plan_step(sizes, np.arange(2), members, token_budget=TOKEN_BUDGET)
    program = make_program(plan, RankShard(members, {"backbone": 0}), 4)
    (microbatch,) = program.roles["backbone"].batches.values()
    assert microbatch.rows_read == {"audio": 9, "image": 6}
    assert {read.modality: (read.maker, read.slices) for read in microbatch.read} == {
        "image": (("encoder_image", 0), (slice(0, 6),)),
        "audio": (("encoder_audio", 0), (slice(0, 9),)),
    }
