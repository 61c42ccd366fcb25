"""The plan of one step: what every plan promises, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing import SYNC_EVERY, CostModel, PackingError, StepPlan
from flowtrain_lightning.packing.simulator import simulate_step
from flowtrain_lightning.packing.step_planner import plan_step
from flowtrain_lightning.packing.step_work import StepRules
from tests.packing.sizes import (
    FEATURES,
    RANKS,
    TOKEN_BUDGET,
    make_sizes,
    meeting_of,
    members_of,
    simulated,
    sizes_strategy,
    work_of,
)


def plan(sizes, backbones=2, encoders=2, *, local=False, colocated=(), **settings) -> StepPlan:
    samples = np.arange(len(sizes), dtype=np.int64) + 1000
    settings = {"token_budget": TOKEN_BUDGET, **settings}
    return plan_step(sizes, samples, members_of(encoders, backbones, colocated=colocated, local=local), **settings)


@given(sizes_strategy(), RANKS, RANKS, st.sampled_from((None, *SYNC_EVERY)))
def test_every_sample_and_media_item_is_computed_once_within_the_budget(sizes, backbone_ranks, encoder_ranks, swaps):
    swapping = {} if swaps is None else {"media_costs": {"encoder": CostModel(0.2, 0.0, 0.0)}, "sync_every": swaps}
    step = plan(sizes, backbone_ranks, encoder_ranks, **swapping)
    members = [microbatch for of_rank in step.microbatches for microbatch in of_rank]
    assert len(step.microbatches) == backbone_ranks
    assert sorted(np.concatenate(members).tolist()) == list(range(len(sizes)))
    assert all(sizes.tokens[microbatch].sum() <= TOKEN_BUDGET for microbatch in members)
    assert len({len(of_rank) for of_rank in step.microbatches}) == 1
    encoded = [item for of_rank in step.batches["encoder"] for batch in of_rank for item in batch.tolist()]
    assert len(step.batches["encoder"]) == encoder_ranks
    assert sorted(encoded) == list(range(len(sizes.media_rows)))
    if swaps is None:
        patches = [
            sum(int(sizes.media_patches[batch].sum()) for batch in of_rank) for of_rank in step.batches["encoder"]
        ]
        assert max(patches) - min(patches) <= max(sizes.media_patches, default=0)


@given(sizes_strategy(), RANKS, RANKS)
def test_readers_positions_never_fall_and_each_reader_is_one_group(sizes, backbone_ranks, encoder_ranks):
    step = plan(sizes, backbone_ranks, encoder_ranks)
    ranks, positions = step.readers
    for of_rank in step.batches["encoder"]:
        in_order = [position for batch in of_rank for position in positions[batch].tolist()]
        assert in_order == sorted(in_order)
        for batch in of_rank:
            readers = list(zip(positions[batch].tolist(), ranks[batch].tolist(), strict=True))
            changes = sum(a != b for a, b in pairwise(readers))
            assert changes == len(set(readers)) - 1


@given(sizes_strategy(), RANKS, RANKS, st.booleans())
def test_entries_hold_all_media_exactly_and_rows_add_up(sizes, backbone_ranks, encoder_ranks, local):
    step = plan(sizes, backbone_ranks, backbone_ranks if local else encoder_ranks, local=local)
    ranks, positions = step.readers
    assert sorted(media for entry in step.entries for media in entry.media.tolist()) == list(
        range(len(sizes.media_rows))
    )
    for entry in step.entries:
        assert entry.rows == sizes.media_rows[entry.media].sum()
        (reader,) = entry.readers
        assert set(ranks[entry.media].tolist()) == {reader.member}
        assert set(positions[entry.media].tolist()) == {reader.number}
        batch = step.batches["encoder"][entry.maker.member][entry.maker.number]
        assert set(entry.media.tolist()) <= set(batch.tolist())
    keys = [(entry.maker, entry.readers) for entry in step.entries]
    assert len(set(keys)) == len(keys)


@given(sizes_strategy(), RANKS)
def test_local_plans_encode_where_they_read(sizes, ranks):
    step = plan(sizes, ranks, ranks, local=True)
    owner = sizes.media_sample
    for microbatches, batches in zip(step.microbatches, step.batches["encoder"], strict=True):
        for members, media in zip(microbatches, batches, strict=True):
            assert media.tolist() == [m for m, sample in enumerate(owner) if sample in members]


def test_positions_rich_in_media_stand_in_the_middle_on_all_ranks():
    text, rich = (80, []), (10, [80])
    step = plan(make_sizes(text, rich, text, rich, text, rich, text, rich), backbones=2)
    media = [[int(np.isin(members, [1, 3, 5, 7]).sum()) for members in of_rank] for of_rank in step.microbatches]
    assert media == [[0, 1, 1, 0], [0, 1, 1, 0]]


def test_a_step_without_media_has_no_encoder_batch_and_no_entry():
    step = plan(make_sizes((10, []), (20, [])))
    assert step.batches["encoder"] == ((), ())
    assert step.entries == ()


def test_one_sample_on_several_ranks_leaves_the_others_empty():
    step = plan(make_sizes((10, [5, 5])), backbones=3, encoders=2)
    assert [[members.tolist() for members in of_rank] for of_rank in step.microbatches] == [[[0]], [[]], [[]]]
    assert [entry.rows for entry in step.entries] == [5, 5]


def test_a_giant_sample_stands_alone():
    step = plan(make_sizes((10, [5]), (20, [80]), (10, [5])), backbones=2)
    assert sorted(members.tolist() for of_rank in step.microbatches for members in of_rank) == [[0, 2], [1]]


def test_the_cost_model_decides_what_is_balanced():
    sizes = make_sizes((50, []), (30, []), (30, []), (10, []), (10, []))
    by_tokens = plan(sizes, cost=CostModel(1.0, 0.0, 0.0))
    by_attention = plan(sizes, cost=CostModel(0.0, 1.0, 0.0))
    assert {int(sizes.tokens[of_rank[0]].sum()) for of_rank in by_tokens.microbatches} == {60, 70}
    assert {int(sizes.tokens[of_rank[0]].sum()) for of_rank in by_attention.microbatches} == {50, 80}


def test_a_sample_over_the_token_budget_is_named_with_its_sizes():
    with pytest.raises(
        PackingError,
        match="Sample 1001 has 130 tokens \\(80 of them from its media\\), more than the token budget of 100",
    ):
        plan(make_sizes((10, []), (50, [60, 20])))


NAMED = {"backbones": "The number of backbone members", "encoders": "The number of encoder members"}


@pytest.mark.parametrize("name", [*NAMED, "token_budget"])
@pytest.mark.parametrize("value", [0, -2])
def test_a_number_below_one_is_refused_by_name(name, value):
    with pytest.raises(PackingError, match=f"{NAMED.get(name, name)} is {value}; it must be at least 1"):
        plan(make_sizes((10, [])), **{name: value})


def test_local_plans_need_as_many_encoder_ranks_as_backbone_ranks():
    with pytest.raises(PackingError, match="'encoder': 3, 'backbone': 2}; make them equal"):
        plan(make_sizes((10, [])), backbones=2, encoders=3, local=True)


def mixed_step(encoder, backbone_ranks, encoder_ranks, sync_every="step", planned_so=False, in_fixed_order=False):
    """What a step takes of which encoding is ``encoder`` times the rest, beside all of it evenly divided."""
    draw = np.random.default_rng(0)
    pictures = draw.integers(16, 400, 200).tolist()
    sizes = make_sizes(*[(int(text), [rows]) for text, rows in zip(draw.integers(10, 400, 200), pictures, strict=True)])
    cost = CostModel(1.0, 0.0, 0.0)
    encoder_cost = CostModel(encoder * sizes.tokens.sum() / sizes.media_patches.sum(), 0.0, 0.0)
    colocated = [(rank, rank) for rank in range(backbone_ranks)]
    planned = {"meets": {"backbone": meeting_of(backbone_ranks)}} if planned_so else {}
    members = members_of(encoder_ranks, backbone_ranks, colocated=colocated, **planned)
    costs = {"cost": cost, "media_costs": {"encoder": encoder_cost}}
    found = plan_step(sizes, np.arange(200), members, token_budget=2048, sync_every=sync_every, **costs)

    ranks = {"backbone": [(rank,) for rank in range(backbone_ranks)], "encoder": [(r,) for r in range(encoder_ranks)]}
    in_flight = {"encoder": 4} if in_fixed_order else {}
    meets = {"backbone": meeting_of(backbone_ranks)} if in_fixed_order else {}
    rules = StepRules(ranks, [FEATURES], in_flight, meets)
    step = simulate_step(work_of(found, cost, encoder_cost), rules)
    return step.makespan / ((cost.of_set(sizes.tokens) + encoder_cost.of_set(sizes.media_patches)) / encoder_ranks)


@pytest.mark.parametrize("encoder", [0.4, 1.0, 2.0])
@pytest.mark.parametrize("sync_every", ["step", "microbatch"])
def test_a_step_of_mixed_ranks_takes_little_longer_than_all_work_evenly_divided(encoder, sync_every):
    assert mixed_step(encoder, 6, 8, sync_every) <= 1.1


@pytest.mark.parametrize("encoder", [0.4, 1.0])
def test_with_a_fixed_order_ranks_that_only_encode_have_their_part_of_every_position(encoder):
    otherwise = mixed_step(encoder, 14, 16, in_fixed_order=True)
    assert mixed_step(encoder, 14, 16, planned_so=True, in_fixed_order=True) < 0.96 * otherwise


def test_work_of_mixed_ranks_beside_encoding_counts_once_where_tensor_ranks_share_it():
    sizes = make_sizes(*[(20, [20])] * 8)
    members = members_of(4, 1, colocated=((0, 0), (1, 0)))
    costs = {"encoder": CostModel(0.25, 0.0, 0.0)}
    found = plan_step(sizes, np.arange(8), members, token_budget=400, media_costs=costs)
    patches = [sum(int(sizes.media_patches[batch].sum()) for batch in of_rank) for of_rank in found.batches["encoder"]]
    assert patches[2] == patches[3] == sizes.media_patches.sum() / 2


@pytest.mark.parametrize("colocated", [((2, 0),), ((0, 0), (1, 2)), ((-1, 0),)])
def test_colocated_members_that_do_not_exist_are_refused(colocated):
    with pytest.raises(PackingError, match="pairs of a member of 'encoder' below 2 and one of 'backbone' below 2"):
        plan(make_sizes((10, [])), colocated=colocated)


def test_sizes_of_other_samples_are_refused():
    with pytest.raises(PackingError, match="There are 3 samples but sizes of 1"):
        plan_step(make_sizes((10, [])), np.arange(3), members_of(), token_budget=10)


def pictures_and_text(seed: int, count: int = 200):
    """Sizes of texts, captioned pictures and pages, as a vision-language mix has them."""
    draw = np.random.default_rng(seed)
    kinds = draw.choice(3, count, p=[0.3, 0.55, 0.15])
    return make_sizes(
        *[
            (
                int(draw.integers((80, 10, 400)[kind], (300, 40, 2000)[kind])),
                draw.integers(200, 500, (0, 1, 1)[kind]).tolist(),
            )
            for kind in kinds
        ]
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sync_every", SYNC_EVERY)
def test_with_an_encoder_cost_the_step_is_shorter_at_no_cost_of_the_backbone(seed, sync_every):
    sizes = pictures_and_text(seed)
    cost = CostModel(1.0, 1 / 24576, 0.0)
    encoder_cost = CostModel(0.25, 0.0, 0.0)
    settings = {"cost": cost, "token_budget": 4096, "sync_every": sync_every}
    ordered = plan(sizes, 4, 2, media_costs={"encoder": encoder_cost}, **settings)
    plain = plan(sizes, 4, 2, **settings)
    found, usual = (simulated(step, cost, encoder_cost, sync_every) for step in (ordered, plain))
    assert found.makespan < usual.makespan or found.makespan == pytest.approx(found.work)
    backbone = [
        [[sum(cost.of_each(sizes.tokens[m])) for m in of_rank] for of_rank in step.microbatches]
        for step in (ordered, plain)
    ]
    time = [np.max(b, axis=0).sum() if sync_every == "microbatch" else np.sum(b, axis=1).max() for b in backbone]
    assert time[0] <= time[1] * 1.0003


def test_ranks_that_synchronise_once_a_step_have_like_totals():
    sizes = make_sizes(*[(tokens, []) for tokens in (90, 60, 50, 40, 30, 20, 10, 10)])
    step = plan(sizes, backbones=2, cost=CostModel(1.0, 0.01, 0.0), sync_every="step")
    totals = [sum(CostModel(1.0, 0.01, 0.0).of_set(sizes.tokens[m]) for m in rank) for rank in step.microbatches]
    assert max(totals) <= 1.02 * np.mean(totals)
