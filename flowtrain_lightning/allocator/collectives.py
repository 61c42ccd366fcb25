"""Time of collectives by their size, their members and the links between them: rings, and trees for small sums.

A ring's steps each cost a latency, so that what a gather takes grows with its members even where its bytes do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.allocator.devices import Cluster
from flowtrain_lightning.allocator.flops import FloatArray

START = 14e-6
"""Seconds of a collective before its first byte, the kernel's launch included (NCCL's tuner, ``src/graph/tuning.cc``:
base latency of a ring)."""

STEP = 1.9e-6
"""Seconds of a ring's step where all members are in one node (there too: NVLink with the LL128 protocol)."""

FAR_STEP, NETWORK_STEP = 3.4e-6, 14e-6
"""Seconds of a step inside and between nodes where a ring has several (there too: the Simple protocol, which large
messages between nodes take)."""

TREE_STEP = 8.5e-6
"""Seconds of a tree's step between nodes (there too: LL128)."""


@dataclass(frozen=True)
class Ring:
    """Devices that exchange with each other, the same in every node.

    Attributes:
        members: ``[layouts]`` how many.
        nodes: ``[layouts]`` nodes that they are on.
        speed: ``[layouts]`` bytes/s per device, as collectives reach them.
    """

    members: FloatArray
    nodes: FloatArray
    speed: FloatArray

    def gather(self, size: FloatArray | float) -> FloatArray:
        """``[layouts]`` seconds of an all-gather or reduce-scatter of ``size`` bytes (Thakur et al. 2005, sec. 3)."""
        moved = np.asarray(size) * (self.members - 1) / self.members / self.speed
        return np.where(self.members > 1, START + self._steps + moved, 0.0)

    def reduce(self, size: FloatArray | float) -> FloatArray:
        """``[layouts]`` seconds of an all-reduce of ``size`` bytes: in a ring, or of few over many nodes in a tree."""
        moved = 2 * np.asarray(size) * (self.members - 1) / self.members / self.speed
        local = np.maximum(1.0, self.members / self.nodes)
        tree = 2 * ((local - 1) * STEP + np.log2(np.maximum(1.0, self.nodes)) * TREE_STEP)
        return np.where(self.members > 1, START + np.minimum(2 * self._steps, tree) + moved, 0.0)

    def send(self, size: FloatArray | float) -> FloatArray:
        """``[layouts]`` seconds in which each member sends ``size`` bytes to the next one."""
        return START + np.asarray(size) / self.speed

    @property
    def _steps(self) -> FloatArray:
        far = (self.members - 1 - self.nodes) * FAR_STEP + self.nodes * NETWORK_STEP
        return np.where(self.nodes > 1, far, (self.members - 1) * STEP)


def ring(cluster: Cluster, members: FloatArray | float, stride: FloatArray | int, share: float) -> Ring:
    """The ring over ``members`` devices, every ``stride``-th one.

    A ring that leaves its node uses the network adapter of every member in the node, up to what the links carry.

    Args:
        cluster: where.
        members: devices of the ring.
        stride: devices from one member to the next.
        share: how much of links and network collectives reach.
    """
    device = cluster.device
    count = np.asarray(members, dtype=np.float64)
    local = np.maximum(1.0, np.minimum(count, cluster.per_node // stride))
    within = count * stride <= cluster.per_node
    paper = np.where(within, device.link, np.minimum(device.link, device.network * local))
    return Ring(count, np.where(within, 1.0, np.ceil(count / local)), share * paper)
