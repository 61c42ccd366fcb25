"""Time of collectives: rings over the slower of links and network (Thakur et al. 2005, section 3)."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.allocator.devices import Cluster
from flowtrain_lightning.allocator.efficiency import Efficiency, FloatArray


def bandwidth(cluster: Cluster, members: FloatArray | float, stride: int) -> FloatArray:
    """Bytes/s per device of a ring over ``members`` devices, every ``stride``-th one.

    A ring that leaves its node uses the network adapter of every member in the node, up to what the links carry.

    Args:
        cluster: where.
        members: devices of a ring.
        stride: devices from one member to the next.
    """
    device = cluster.device
    count = np.asarray(members, dtype=np.float64)
    local = np.maximum(1.0, np.minimum(count, cluster.per_node // stride))
    within = count * stride <= cluster.per_node
    return np.where(within, device.link, np.minimum(device.link, device.network * local))


def gather_seconds(
    size: FloatArray | float, members: FloatArray | float, speed: FloatArray, share: Efficiency
) -> FloatArray:
    """Time of an all-gather or reduce-scatter of ``size`` bytes; an all-reduce takes twice that.

    Args:
        size: bytes of the whole.
        members: devices of the ring.
        speed: bytes/s per device on paper.
        share: how much of it is reached.
    """
    count = np.asarray(members, dtype=np.float64)
    moved = np.asarray(size) * (count - 1) / count / (speed * share.exchange)
    return np.where(count > 1, moved + share.latency, 0.0)
