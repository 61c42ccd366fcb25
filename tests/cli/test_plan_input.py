"""Devices in equal nodes."""

from __future__ import annotations

import pytest

from flowtrain_lightning.cli.plan_input import fewest_nodes


@pytest.mark.parametrize(("devices", "nodes"), [(4, 1), (8, 1), (16, 2), (12, 2), (13, 13), (27, 9), (520, 65)])
def test_all_devices_of_a_plan_start_on_equal_nodes_of_at_most_eight(devices, nodes):
    assert fewest_nodes(devices, 8) == nodes
    assert nodes * (devices // nodes) == devices
