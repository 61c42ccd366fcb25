"""Devices and clusters."""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator import DEVICES, Cluster, PlanningError, device_from, named_device
from flowtrain_lightning.allocator.coefficients import assumed_efficiency
from flowtrain_lightning.allocator.devices import fewest_nodes, maker_device


def test_every_known_device_says_where_its_numbers_are_from():
    assert {
        "a100",
        "h100",
        "h200",
        "b200",
        "gb200",
        "b300",
        "h20",
        "l40s",
        "mi300x",
        "mi325x",
        "ascend-910b",
        "cpu",
    } <= set(DEVICES)
    assert all(len(device.source) > 20 for device in DEVICES.values())


def test_a_device_of_ones_own_may_start_from_a_known_one():
    own = device_from({"name": "mine", "like": "h100", "memory": "96e9", "per_node": 4})
    assert (own.memory, own.per_node, own.peak) == (96e9, 4, DEVICES["h100"].peak)
    assert own.source == "given by the user"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_makers_name_speaks_of_a_known_device(name, known):
    assert maker_device(name) is DEVICES[known]


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH200 480GB", "AMD EPYC"],
)
def test_a_device_with_other_peaks_is_not_taken_for_a_known_one(name):
    assert maker_device(name) is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "mine", "like": "h101"}, "no device 'h101'. Did you mean 'h100'"),
        ({"name": "mine", "peak": 1e12}, "A device needs peak_float32, memory, memory_bandwidth, "),
        ({"name": "mine", "like": "a100", "color": "red"}, "A device has no color. Its attributes are name, peak"),
        ({"name": "mine", "like": "a100", "memory": "plenty"}, "device's memory is 'plenty'; it must be a number"),
        ({"name": "mine", "like": "a100", "memory": None}, "device's memory is None; it must be a number"),
        ({"name": "mine", "like": "a100", "memory": True}, "device's memory is True; it must be a number"),
        ({"name": "mine", "like": "a100", "memory": 0}, "'mine' has memory 0.0; it must be above 0"),
        ({"name": "mine", "like": "a100", "dense": 1.2}, "has dense 1.2; a share is at most 1"),
    ],
)
def test_a_device_that_cannot_be_is_refused(values, words):
    with pytest.raises(PlanningError, match=words):
        device_from(values)


def test_an_unknown_device_is_answered_with_those_that_are_known():
    with pytest.raises(PlanningError, match=r"no device 'h1000'\. Did you mean 'h100'\? Known are a100, a800, h100"):
        named_device("h1000")


@pytest.mark.parametrize(
    ("devices", "per_node", "words"),
    [
        (0, 8, "There are 0 devices; a plan needs at least 1"),
        (12, 8, "12 devices cannot be divided into nodes of 8"),
        (4, 0, "into nodes of 0"),
    ],
)
def test_devices_fill_their_nodes(devices, per_node, words):
    with pytest.raises(PlanningError, match=words):
        Cluster(DEVICES["h100"], devices, per_node)


def test_each_precision_has_its_peak():
    device = DEVICES["h100"]
    assert (device.peak_for(2), device.peak_for(4)) == (989e12, 494e12)


def test_training_sustains_less_of_a_devices_peaks_than_kernels_measured_alone():
    for device in DEVICES.values():
        share = assumed_efficiency(device)
        assert 0.5 * device.dense < share.dense < device.dense
        assert 0.3 * device.attention < share.attention < device.attention


def test_memory_is_what_cards_report():
    assert DEVICES["h100"].memory == 85.5e9
    assert DEVICES["b200"].memory == 191.5e9


def test_fewer_devices_than_a_node_has_are_a_part_of_one():
    assert Cluster(DEVICES["h100"], 3, 8).devices == 3


@pytest.mark.parametrize(("devices", "nodes"), [(4, 1), (8, 1), (16, 2), (12, 2), (13, 13), (27, 9), (520, 65)])
def test_all_devices_of_a_plan_start_on_equal_nodes_of_at_most_eight(devices, nodes):
    assert fewest_nodes(devices, 8) == nodes
    assert nodes * (devices // nodes) == devices


def test_devices_that_share_a_layer_start_on_one_node():
    assert fewest_nodes(12, 8, together=4) == 3
    assert fewest_nodes(24, 8, together=8) == 3
    assert fewest_nodes(9, 8, together=2) is None
    assert fewest_nodes(7, 8, together=2) == 1, "one node has them all"
