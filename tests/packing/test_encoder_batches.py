"""Media items to encoder batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing import PackingError
from flowtrain_lightning.packing.encoder_batches import local_encoder_batches, pack_encoder_batches, within_budget
from flowtrain_lightning.packing.step_planner import plan_step
from tests.packing.sizes import make_sizes, plan_of, sizes_strategy

PLACEMENTS = ("separate", "colocated", "mixed", "local")


def pack(costs, backbone_rank, position, **settings):
    batches = pack_encoder_batches(
        np.array(costs, dtype=np.float64),
        np.array(backbone_rank, dtype=np.int64),
        np.array(position, dtype=np.int64),
        **{"encoder_ranks": 1, **settings},
    )
    return [[batch.tolist() for batch in of_rank] for of_rank in batches]


def test_every_rank_has_one_batch_per_position():
    assert pack([8, 8, 8, 8], [0, 0, 0, 0], [1, 0, 1, 0], encoder_ranks=2) == [[[1], [0]], [[3], [2]]]


def test_inside_a_batch_the_media_items_of_one_reader_are_adjacent():
    assert pack([1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0] * 5) == [[[1, 3, 0, 2, 4]]]


def test_the_next_media_item_goes_to_the_rank_with_the_least_cost_of_the_step():
    assert pack([90, 10, 20, 30], [0] * 4, [0, 0, 1, 1], encoder_ranks=2) == [[[0]], [[1], [2, 3]]]


def test_a_rank_without_media_has_no_batch():
    assert pack([5], [0], [0], encoder_ranks=3) == [[[0]], [], []]
    assert pack([], [], [], encoder_ranks=2) == [[], []]


def test_local_batches_hold_just_what_their_microbatch_reads():
    batches = local_encoder_batches(np.array([0, 1, 1, 1]), np.array([1, 0, 0, 1]), ranks=2, positions=2)
    assert [[batch.tolist() for batch in of_rank] for of_rank in batches] == [[[], [0]], [[1, 2], [3]]]
    assert all(batch.dtype == np.int64 for of_rank in batches for batch in of_rank)


def test_a_batch_beyond_the_budget_is_cut_in_its_order():
    patches = np.array([5, 5, 5, 20, 5, 3])
    ((*parts,),) = within_budget(((np.arange(6),),), patches, 10)
    assert [part.tolist() for part in parts] == [[0, 1], [2], [3], [4, 5]]


@given(sizes_strategy(20), st.integers(1, 4), st.integers(1, 3), st.integers(1, 60), st.sampled_from(PLACEMENTS))
def test_no_batch_is_beyond_the_budget_but_that_of_one_larger_media_item(sizes, encoders, backbones, budget, placement):
    settings = {"local": True} if placement == "local" else {}
    if placement in ("colocated", "local"):
        encoders = backbones
        settings["colocated_lanes"] = () if placement == "local" else tuple((n, n) for n in range(encoders))
    if placement == "mixed":
        settings["colocated_lanes"] = ((0, 0),)
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget, **settings)
    position_of = plan.readers[1]
    for batches, turns in zip(plan.encoder_batches, plan.encoder_turns, strict=True):
        of_media = [(media, turn) for media, turn in zip(batches, turns, strict=True) if len(media)]
        assert [turn for _, turn in of_media] == sorted({turn for _, turn in of_media})
        for media, (position, _) in of_media:
            assert len(media) == 1 or sizes.media_patches[media].sum() <= budget
            assert (position_of[media] == position).all()
    dealt = [batch for of_rank in plan.encoder_batches for batch in of_rank]
    assert sorted(np.concatenate([np.empty(0, int), *dealt])) == list(range(len(sizes.media_rows)))


def test_ranks_are_even_to_a_thousandth_over_a_step_of_pictures():
    generator = np.random.default_rng(0)
    costs = generator.integers(16, 5000, 700)
    batches = pack(costs, generator.integers(0, 8, 700), generator.integers(0, 4, 700), encoder_ranks=2)
    totals = [sum(costs[item] for batch in of_rank for item in batch) for of_rank in batches]
    assert 1 - np.mean(totals) / max(totals) < 0.001


def test_media_items_are_encoded_where_they_are_read_unless_balance_moves_them():
    settings = {"encoder_ranks": 2, "colocated_lanes": ((0, 0), (1, 1))}
    assert pack([10] * 8, np.repeat([0, 1], 4), [0] * 8, **settings) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    uneven = pack([10] * 8, np.repeat([0, 1], [6, 2]), [0] * 8, **settings)
    assert [sum(len(batch) for batch in of_rank) for of_rank in uneven] == [4, 4]
    assert {6, 7} <= set(uneven[1][0])


def test_of_ranks_that_share_a_sequence_each_encodes_as_much_of_its_media():
    """Context ranks: four processes encode, two and two of which read the same sequences."""
    lanes = tuple((process, process // 2) for process in range(4))
    batches = pack([10] * 8, np.repeat([0, 1], 4), [0] * 8, encoder_ranks=4, colocated_lanes=lanes)
    assert batches == [[[0, 2]], [[1, 3]], [[4, 6]], [[5, 7]]]


def test_media_items_whose_readers_do_not_encode_go_where_least_is_to_do():
    # Backbone rank 1 shares a rank with encoder rank 0; backbone rank 0 only reads, encoder rank 1 only encodes.
    settings = {"encoder_ranks": 2, "colocated_lanes": ((0, 1),)}
    assert pack([10] * 4, [1, 1, 0, 0], [0] * 4, **settings) == [[[0, 1]], [[2, 3]]]


def test_ranks_that_only_encode_come_first_and_others_encode_what_these_cannot():
    # Encoder rank 0 is on the backbone rank that reads, and has 50 to do there; encoder rank 1 only encodes.
    settings = {"encoder_ranks": 2, "colocated_lanes": ((0, 0),), "busy": np.array([50.0, 0.0])}
    assert pack([10] * 4, [0] * 4, [0] * 4, **settings) == [[], [[0, 1, 2, 3]]]
    both = pack([10] * 9, [0] * 9, [0] * 9, **settings)
    assert [sum(len(batch) for batch in of_rank) for of_rank in both] == [2, 7]


def test_ranks_that_only_encode_are_even_where_the_others_have_no_time_to_encode():
    settings = {"encoder_ranks": 3, "colocated_lanes": ((0, 0),), "busy": np.array([500.0, 0.0, 0.0])}
    first, *others = pack([40, 30, 20, 10], [0] * 4, [0] * 4, **settings)
    assert first == []
    assert [sum(len(batch) for batch in of_rank) for of_rank in others] == [2, 2]


def moved_rows(plan):
    """Rows of features that encoder rank ``r`` hands to other backbone ranks than ``r``."""
    return sum(entry.rows for entry in plan.entries if entry.backbone_rank != entry.encoder_rank)


@pytest.mark.parametrize("seed", range(3))
def test_of_a_colocated_step_little_moves_and_ranks_are_even(seed):
    rows = np.random.default_rng(seed).integers(100, 2000, 400)
    sizes = make_sizes(*[(10, [count]) for count in rows.tolist()])
    settings = {"backbone_ranks": 4, "encoder_ranks": 4, "token_budget": 8192}
    colocated = plan_step(sizes, np.arange(400), colocated_lanes=[(rank, rank) for rank in range(4)], **settings)
    loads = [sum(int(sizes.media_patches[batch].sum()) for batch in of_rank) for of_rank in colocated.encoder_batches]
    assert max(loads) <= 1.001 * np.mean(loads)
    assert moved_rows(colocated) < 0.15 * moved_rows(plan_step(sizes, np.arange(400), **settings))


def test_media_items_are_encoded_on_their_readers_node_as_long_as_ranks_stay_even():
    generator = np.random.default_rng(0)
    costs, reader = generator.integers(16, 5000, 700), generator.integers(0, 12, 700)
    nodes = {"encoder_nodes": (0, 0, 1, 1), "backbone_nodes": (0,) * 6 + (1,) * 6}
    position = generator.integers(0, 4, 700)

    def sent_elsewhere(batches):
        reader_node = np.array(nodes["backbone_nodes"])[reader]
        of_rank = [np.concatenate(own) for own in batches]
        return sum((reader_node[own] != nodes["encoder_nodes"][rank]).sum() for rank, own in enumerate(of_rank)) / 700

    near = pack(costs, reader, position, encoder_ranks=4, **nodes)
    totals = [sum(costs[item] for batch in of_rank for item in batch) for of_rank in near]
    assert 1 - np.mean(totals) / max(totals) < 0.001
    assert sent_elsewhere(near) < 0.1 < 0.4 < sent_elsewhere(pack(costs, reader, position, encoder_ranks=4))


def test_a_node_that_encodes_nothing_is_served_by_the_others():
    nodes = {"encoder_nodes": (0, 0), "backbone_nodes": (0, 1)}
    assert pack([10] * 4, [1] * 4, [0] * 4, encoder_ranks=2, **nodes) == [[[0, 2]], [[1, 3]]]


def step_of_two_modalities(modalities, **settings):
    """Samples of one media item each, by turns an image and an audio clip of other sizes."""
    draw = np.random.default_rng(1)
    sizes = make_sizes(*((5, [int(draw.integers(1, 40))]) for _ in range(60)))
    sizes = replace(sizes, media_modality=np.array(["image", "audio"] * 30))
    return plan_step(sizes, np.arange(60), **{"backbone_ranks": 2, "token_budget": 200, **settings}, **modalities)


def test_each_encoder_gets_the_media_of_its_modality_evenly_over_its_ranks():
    plan = step_of_two_modalities({"encoders": (("image", 3), ("audio", 2))}, encoder_ranks=5)
    totals = np.zeros(5)
    for rank, batches in enumerate(plan.encoder_batches):
        for batch in batches:
            assert set(plan.sizes.media_modality[batch]) == {"image" if rank < 3 else "audio"}
            totals[rank] += plan.sizes.media_patches[batch].sum()
        positions = [plan.readers[1][batch].tolist() for batch in batches]
        assert all(len(set(of_batch)) == 1 for of_batch in positions)
        assert positions == sorted(positions)
    dealt = np.concatenate([batch for of_rank in plan.encoder_batches for batch in of_rank])
    assert sorted(dealt.tolist()) == list(range(60))
    for of_encoder in (totals[:3], totals[3:]):
        assert of_encoder.max() / of_encoder.mean() < 1.05


def test_ranks_that_encode_what_they_read_have_a_batch_per_microbatch_and_modality():
    plan = step_of_two_modalities({"local": True}, encoder_ranks=2)
    for rank, batches in enumerate(plan.encoder_batches):
        encoded = [(set(plan.sizes.media_modality[batch]), set(plan.readers[1][batch])) for batch in batches]
        assert encoded == [
            ({modality}, {position}) for position in range(len(plan.microbatches[0])) for modality in ("audio", "image")
        ]
        assert all((plan.readers[0][batch] == rank).all() for batch in batches)


@pytest.mark.parametrize(
    ("encoders", "words"),
    [
        (
            (),
            "of the modalities audio, image, but one encoder gets media of one .* halves: encoder_audio, encoder_image",
        ),
        ((("image", 1), ("video", 1)), "of the modality 'audio', but the encoders take image, video"),
    ],
)
def test_media_that_no_encoder_takes_are_refused(encoders, words):
    with pytest.raises(PackingError, match=words):
        step_of_two_modalities({"encoders": encoders}, encoder_ranks=2)
