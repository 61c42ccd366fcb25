"""The allocation by rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.allocator import AllocationError, default_allocation


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
        ({"devices": 4, "encoder_ranks": 1, "placement": "colocated"}, "every rank encodes; leave encoder_ranks out"),
        ({"devices": 4, "placement": "mixed"}, "no placement 'mixed'; choose from 'separate', 'colocated'"),
        ({"devices": 4, "devices_per_node": 3}, "4 devices cannot be divided into nodes of 3"),
        ({"devices": 4, "devices_per_node": 0}, "4 devices cannot be divided into nodes of 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(arguments, words):
    with pytest.raises(AllocationError, match=words):
        default_allocation(**arguments)
