"""Which rank has which role: by a plan's layouts, and by the rule of thumb."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flowtrain_lightning.allocator import AllocationError, Layout, default_allocation
from flowtrain_lightning.allocator.rank_assignment import assign_ranks

DEGREES = st.sampled_from([1, 2, 4, 8])


def test_encoders_are_the_last_ranks_of_each_node():
    ranks = assign_ranks({"encoder": Layout(data=4), "backbone": Layout(data=6, tensor=2)}, "backbone", 8)
    assert ranks["encoder"] == (6, 7, 14, 15)


def test_tensor_ranks_of_the_backbone_stay_together():
    ranks = assign_ranks({"encoder": Layout(data=4), "backbone": Layout(data=3, tensor=4)}, "backbone", 8)
    assert ranks == {"encoder": (12, 13, 14, 15), "backbone": tuple(range(12))}


def test_a_backbone_smaller_than_a_group_of_tensor_ranks_comes_first_on_its_node():
    ranks = assign_ranks({"encoder": Layout(data=2, tensor=2), "backbone": Layout()}, "backbone", 8)
    assert ranks == {"encoder": (1, 2, 3, 4), "backbone": (0,)}
    layouts = {"encoder": Layout(tensor=4), "encoder_audio": Layout(2), "backbone": Layout(2)}
    assert assign_ranks(layouts, "backbone", 4)["backbone"] == (0, 1)


def test_a_backbone_that_would_have_the_end_of_the_last_node_is_refused():
    with pytest.raises(AllocationError, match=r"The backbone has 1 device, .* groups of 4; give it at least 4"):
        assign_ranks({"encoder": Layout(data=2, tensor=4), "backbone": Layout()}, "backbone", 8)


@given(
    st.lists(st.tuples(st.integers(1, 12), DEGREES, st.sampled_from([1, 2, 3])), min_size=2, max_size=3),
    st.sampled_from([8, 16]),
)
def test_every_group_of_tensor_ranks_is_on_one_node_and_every_rank_has_one_role(shapes, per_node):
    names = ["backbone", "encoder_image", "encoder_audio"]
    layouts = {
        name: Layout(data, tensor, pipeline) for name, (data, tensor, pipeline) in zip(names, shapes, strict=False)
    }
    one_node = sum(layout.ranks for layout in layouts.values()) <= per_node
    assume(one_node or layouts["backbone"].ranks >= max(layout.tensor for layout in layouts.values()))
    ranks = assign_ranks(layouts, "backbone", per_node)
    used = sorted(rank for found in ranks.values() for rank in found)
    assert used == list(range(sum(layout.ranks for layout in layouts.values())))
    assert 0 in ranks["backbone"]
    for role, layout in layouts.items():
        assert list(ranks[role]) == sorted(ranks[role])
        for start in range(0, layout.ranks, layout.tensor):
            group = ranks[role][start : start + layout.tensor]
            assert len({rank // per_node for rank in group}) == 1


def test_one_device_is_colocated():
    allocation = default_allocation(1)
    assert allocation.placement == "colocated"
    assert allocation.ranks == {"encoder": (0,), "backbone": (0,)}


@pytest.mark.parametrize(
    ("devices", "encoder"), [(2, (1,)), (3, (2,)), (4, (3,)), (7, (6,)), (8, (6, 7)), (16, (12, 13, 14, 15))]
)
def test_a_quarter_of_the_ranks_encodes_but_at_least_one(devices, encoder):
    allocation = default_allocation(devices)
    assert allocation.placement == "separate"
    assert allocation.ranks["encoder"] == encoder
    assert allocation.layouts["encoder"].data == len(encoder)
    assert allocation.layouts["backbone"].data == devices - len(encoder)


def test_the_last_ranks_of_each_node_encode():
    assert default_allocation(16, devices_per_node=8).ranks["encoder"] == (6, 7, 14, 15)


def test_what_does_not_divide_goes_to_the_last_nodes():
    assert default_allocation(12, encoder_ranks=4, devices_per_node=4).ranks["encoder"] == (3, 7, 10, 11)
    assert default_allocation(4, encoder_ranks=1, devices_per_node=2).ranks["encoder"] == (3,)


@given(st.tuples(st.integers(1, 5), st.integers(1, 8)).filter(lambda shape: shape != (1, 1)), st.data())
def test_any_split_keeps_rank_0_for_the_backbone_and_uses_every_rank_once(shape, data):
    nodes, per_node = shape
    devices = nodes * per_node
    encoder_ranks = data.draw(st.none() | st.integers(1, devices - 1))
    ranks = default_allocation(devices, encoder_ranks=encoder_ranks, devices_per_node=per_node).ranks
    assert 0 in ranks["backbone"]
    assert sorted(ranks["encoder"] + ranks["backbone"]) == list(range(devices))
    assert encoder_ranks in (None, len(ranks["encoder"]))


def test_in_a_mixed_plan_all_ranks_encode_and_the_separate_encoder_ranks_only_that():
    mixed, separate = (default_allocation(8, placement, 3, 4) for placement in ("mixed", "separate"))
    assert mixed.ranks == {"encoder": tuple(range(8)), "backbone": separate.ranks["backbone"]}
    assert mixed.layouts["encoder"].data == 8


@pytest.mark.parametrize("devices", [1, 3])
def test_colocated_gives_both_roles_to_every_rank(devices):
    allocation = default_allocation(devices, placement="colocated")
    everyone = tuple(range(devices))
    assert allocation.ranks == {"encoder": everyone, "backbone": everyone}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": 0}, "There are 0 devices; training needs at least 1"),
        ({"devices": 4, "encoder_ranks": 4}, "4 encoder ranks leave no backbone rank on 4 devices; use at most 3"),
        ({"devices": 4, "encoder_ranks": 0}, "encoder_ranks is 0; at least 1 rank must encode"),
        ({"devices": 1, "encoder_ranks": 1}, "need at least 2 devices, but there is 1"),
        ({"devices": 1, "placement": "separate"}, 'need at least 2 devices, but there is 1; use placement="colocated"'),
        ({"devices": 4, "encoder_ranks": 1, "placement": "colocated"}, "no rank only encodes; leave encoder_ranks out"),
        ({"devices": 4, "placement": "apart"}, "no placement 'apart'; choose from 'separate', 'colocated', 'mixed'"),
        ({"devices": 4, "devices_per_node": 3}, "4 devices cannot be divided into nodes of 3"),
        ({"devices": 4, "devices_per_node": 0}, "4 devices cannot be divided into nodes of 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(arguments, words):
    with pytest.raises(AllocationError, match=words):
        default_allocation(**arguments)
