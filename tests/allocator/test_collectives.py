"""Collectives: what bytes, members and links cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.allocator import DEVICES, Cluster
from flowtrain_lightning.allocator.collectives import START, ring

H100 = DEVICES["h100"]


def of(members, devices=1024, stride=1, device=H100):
    return ring(Cluster(device, devices, 8), np.array([float(members)]), stride, 1.0)


def test_a_ring_alone_exchanges_nothing():
    assert of(1).gather(1e9)[0] == of(1).reduce(1e9)[0] == 0


def test_many_bytes_take_what_the_links_allow():
    assert of(8).gather(80e9)[0] == pytest.approx(80e9 * 7 / 8 / H100.link, rel=1e-3)
    assert of(8).reduce(80e9)[0] == pytest.approx(2 * of(8).gather(80e9)[0], rel=1e-3)


def test_between_nodes_every_device_has_its_own_adapter():
    whole_nodes, one_of_each = of(16), of(2, stride=8)
    assert whole_nodes.speed[0] == 8 * H100.network
    assert one_of_each.speed[0] == H100.network


def test_the_same_bytes_take_longer_among_more_devices():
    times = [float(of(members).gather(1e8)[0]) for members in (8, 16, 64, 256, 1024)]
    assert times == sorted(times)
    assert times[-1] - times[1] > 1008 * 3e-6


def test_few_bytes_are_summed_over_many_nodes_in_a_tree_and_not_in_a_ring():
    few = of(1024)
    assert START < few.reduce(1e3)[0] < few.gather(1e3)[0] / 5


def test_faster_links_are_never_slower():
    faster = replace(H100, link=2 * H100.link, network=2 * H100.network)
    for members in (2, 8, 64):
        assert of(members, device=faster).gather(1e8)[0] < of(members).gather(1e8)[0]
