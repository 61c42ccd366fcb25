"""Media items to encoder batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing import PackingError
from flowtrain_lightning.packing.encoder_batches import local_encoder_batches, pack_encoder_batches, within_budget
from flowtrain_lightning.packing.role_graph import graph_of
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_planner import plan_step
from tests.packing.sizes import make_sizes, members_of, plan_of, sizes_strategy

PLACEMENTS = ("separate", "colocated", "mixed", "local")


def pack(costs, reader, position, **settings):
    batches = pack_encoder_batches(
        np.array(costs, dtype=np.float64),
        np.array(reader, dtype=np.int64),
        np.array(position, dtype=np.int64),
        **{"members": 1, **settings},
    )
    return [[batch.tolist() for batch in of_rank] for of_rank in batches]


def test_every_rank_has_one_batch_per_position():
    assert pack([8, 8, 8, 8], [0, 0, 0, 0], [1, 0, 1, 0], members=2) == [[[1], [0]], [[3], [2]]]


def test_inside_a_batch_the_media_items_of_one_reader_are_adjacent():
    assert pack([1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0] * 5) == [[[1, 3, 0, 2, 4]]]


def test_the_next_media_item_goes_to_the_rank_with_the_least_cost_of_the_step():
    assert pack([90, 10, 20, 30], [0] * 4, [0, 0, 1, 1], members=2) == [[[0]], [[1], [2, 3]]]


def test_a_rank_without_media_has_no_batch():
    assert pack([5], [0], [0], members=3) == [[[0]], [], []]
    assert pack([], [], [], members=2) == [[], []]


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
        settings["colocated"] = () if placement == "local" else tuple((n, n) for n in range(encoders))
    if placement == "mixed":
        settings["colocated"] = ((0, 0),)
    plan = plan_of(sizes, encoders, backbones, encoder_budget=budget, **settings)
    position_of = plan.readers[1]
    for batches, turns in zip(plan.batches["encoder"], plan.turns["encoder"], strict=True):
        of_media = [(media, turn) for media, turn in zip(batches, turns, strict=True) if len(media)]
        assert [turn for _, turn in of_media] == sorted({turn for _, turn in of_media})
        for media, (position, _) in of_media:
            assert len(media) == 1 or sizes.media_patches[media].sum() <= budget
            assert (position_of[media] == position).all()
    dealt = [batch for of_rank in plan.batches["encoder"] for batch in of_rank]
    assert sorted(np.concatenate([np.empty(0, int), *dealt])) == list(range(len(sizes.media_rows)))


def test_ranks_are_even_to_a_thousandth_over_a_step_of_pictures():
    generator = np.random.default_rng(0)
    costs = generator.integers(16, 5000, 700)
    batches = pack(costs, generator.integers(0, 8, 700), generator.integers(0, 4, 700), members=2)
    totals = [sum(costs[item] for batch in of_rank for item in batch) for of_rank in batches]
    assert 1 - np.mean(totals) / max(totals) < 0.001


def test_media_items_are_encoded_where_they_are_read_unless_balance_moves_them():
    settings = {"members": 2, "colocated": ((0, 0), (1, 1))}
    assert pack([10] * 8, np.repeat([0, 1], 4), [0] * 8, **settings) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    uneven = pack([10] * 8, np.repeat([0, 1], [6, 2]), [0] * 8, **settings)
    assert [sum(len(batch) for batch in of_rank) for of_rank in uneven] == [4, 4]
    assert {6, 7} <= set(uneven[1][0])


def test_of_ranks_that_share_a_sequence_each_encodes_as_much_of_its_media():
    """Context ranks: four processes encode, two and two of which read the same sequences."""
    lanes = tuple((process, process // 2) for process in range(4))
    batches = pack([10] * 8, np.repeat([0, 1], 4), [0] * 8, members=4, colocated=lanes)
    assert batches == [[[0, 2]], [[1, 3]], [[4, 6]], [[5, 7]]]


def test_media_items_whose_readers_do_not_encode_go_where_least_is_to_do():
    # Backbone rank 1 shares a rank with encoder rank 0; backbone rank 0 only reads, encoder rank 1 only encodes.
    settings = {"members": 2, "colocated": ((0, 1),)}
    assert pack([10] * 4, [1, 1, 0, 0], [0] * 4, **settings) == [[[0, 1]], [[2, 3]]]


def test_ranks_that_only_encode_come_first_and_others_encode_what_these_cannot():
    # Encoder rank 0 is on the backbone rank that reads, and has 50 to do there; encoder rank 1 only encodes.
    settings = {"members": 2, "colocated": ((0, 0),), "busy": np.array([50.0, 0.0])}
    assert pack([10] * 4, [0] * 4, [0] * 4, **settings) == [[], [[0, 1, 2, 3]]]
    both = pack([10] * 9, [0] * 9, [0] * 9, **settings)
    assert [sum(len(batch) for batch in of_rank) for of_rank in both] == [2, 7]


def test_ranks_that_only_encode_are_even_where_the_others_have_no_time_to_encode():
    settings = {"members": 3, "colocated": ((0, 0),), "busy": np.array([500.0, 0.0, 0.0])}
    first, *others = pack([40, 30, 20, 10], [0] * 4, [0] * 4, **settings)
    assert first == []
    assert [sum(len(batch) for batch in of_rank) for of_rank in others] == [2, 2]


def moved_rows(plan):
    """Rows of features that encoder rank ``r`` hands to other backbone ranks than ``r``."""
    return sum(entry.rows for entry in plan.entries if entry.readers[0].member != entry.maker.member)


@pytest.mark.parametrize("seed", range(3))
def test_of_a_colocated_step_little_moves_and_ranks_are_even(seed):
    rows = np.random.default_rng(seed).integers(100, 2000, 400)
    sizes = make_sizes(*[(10, [count]) for count in rows.tolist()])
    of_both = members_of(4, 4, colocated=[(rank, rank) for rank in range(4)])
    colocated = plan_step(sizes, np.arange(400), of_both, token_budget=8192)
    loads = [
        sum(int(sizes.media_patches[batch].sum()) for batch in of_rank) for of_rank in colocated.batches["encoder"]
    ]
    assert max(loads) <= 1.001 * np.mean(loads)
    apart = plan_step(sizes, np.arange(400), members_of(4, 4), token_budget=8192)
    assert moved_rows(colocated) < 0.15 * moved_rows(apart)


def test_media_items_are_encoded_on_their_readers_node_as_long_as_ranks_stay_even():
    generator = np.random.default_rng(0)
    costs, reader = generator.integers(16, 5000, 700), generator.integers(0, 12, 700)
    nodes = {"nodes": (0, 0, 1, 1), "reader_nodes": (0,) * 6 + (1,) * 6}
    position = generator.integers(0, 4, 700)

    def sent_elsewhere(batches):
        reader_node = np.array(nodes["reader_nodes"])[reader]
        of_rank = [np.concatenate(own) for own in batches]
        return sum((reader_node[own] != nodes["nodes"][rank]).sum() for rank, own in enumerate(of_rank)) / 700

    near = pack(costs, reader, position, members=4, **nodes)
    totals = [sum(costs[item] for batch in of_rank for item in batch) for of_rank in near]
    assert 1 - np.mean(totals) / max(totals) < 0.001
    assert sent_elsewhere(near) < 0.1 < 0.4 < sent_elsewhere(pack(costs, reader, position, members=4))


def test_a_node_that_encodes_nothing_is_served_by_the_others():
    nodes = {"nodes": (0, 0), "reader_nodes": (0, 1)}
    assert pack([10] * 4, [1] * 4, [0] * 4, members=2, **nodes) == [[[0, 2]], [[1, 3]]]


IMAGES_AND_AUDIO = graph_of(("encoder_image", "encoder_audio", "backbone"))


def step_of_two_modalities(members):
    """Samples of one media item each, by turns an image and an audio clip of other sizes."""
    draw = np.random.default_rng(1)
    sizes = make_sizes(*((5, [int(draw.integers(1, 40))]) for _ in range(60)))
    sizes = replace(sizes, media_modality=np.array(["image", "audio"] * 30))
    return plan_step(sizes, np.arange(60), members, token_budget=200)


def test_each_encoder_gets_the_media_of_its_modality_evenly_over_its_members():
    counts = {"encoder_image": 3, "encoder_audio": 2, "backbone": 2}
    plan = step_of_two_modalities(StepMembers(counts, IMAGES_AND_AUDIO))
    dealt = []
    for role in plan.graph.producers:
        totals = np.zeros(counts[role])
        for member, batches in enumerate(plan.batches[role]):
            for batch in batches:
                assert set(plan.sizes.media_modality[batch]) == {plan.graph.modality_of(role)}
                totals[member] += plan.sizes.media_patches[batch].sum()
            positions = [plan.readers[1][batch].tolist() for batch in batches]
            assert all(len(set(of_batch)) == 1 for of_batch in positions)
            assert positions == sorted(positions)
            dealt += [item for batch in batches for item in batch.tolist()]
        assert totals.max() / totals.mean() < 1.05
    assert sorted(dealt) == list(range(60))


def test_ranks_that_encode_what_they_read_have_a_batch_per_microbatch_and_modality():
    plan = step_of_two_modalities(members_of(2, 2, local=True))
    for rank, batches in enumerate(plan.batches["encoder"]):
        encoded = [(set(plan.sizes.media_modality[batch]), set(plan.readers[1][batch])) for batch in batches]
        assert encoded == [
            ({modality}, {position}) for position in range(len(plan.microbatches[0])) for modality in ("audio", "image")
        ]
        assert all((plan.readers[0][batch] == rank).all() for batch in batches)


IMAGES_AND_VIDEOS = graph_of(("encoder_image", "encoder_video", "backbone"))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (
            members_of(),
            "of the modalities audio, image, but one encoder gets media of one .* halves: encoder_audio, encoder_image",
        ),
        (
            StepMembers(dict.fromkeys(IMAGES_AND_VIDEOS.roles, 1), IMAGES_AND_VIDEOS),
            "of the modality 'audio', but the encoders take image, video",
        ),
    ],
    ids=["one encoder", "others"],
)
def test_media_that_no_encoder_takes_are_refused(members, words):
    with pytest.raises(PackingError, match=words):
        step_of_two_modalities(members)
