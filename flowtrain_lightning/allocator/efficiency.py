"""How much of a device's peaks computing reaches: assumed from public measurements, or fitted by a profiler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.allocator.devices import Device

FloatArray = NDArray[np.float64]

TILE = 128
"""Rows and columns of the tile of a result that one processor computes at a time (NVIDIA, "Matrix multiplication
background user's guide", tile and wave quantization)."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's peaks that one role's computing reaches.

    Attributes:
        dense: of the peak FLOP/s, by a large matrix product.
        attention: of the peak FLOP/s, by fused attention.
        memory: of the memory bandwidth, by what moves data and hardly computes.
        exchange: of links and network, by collectives.
        launch: seconds that starting a layer's kernels takes, forward; twice that backward. Where kernels are shorter
            than that, starting them is what takes the time.
        latency: seconds that a collective takes however little it moves.
        slack: time of a pass over the time of its kernels and collectives: gaps, stragglers, what is not modelled.
    """

    dense: float
    attention: float
    memory: float = 0.8
    exchange: float = 0.8
    launch: float = 60e-6
    latency: float = 15e-6
    slack: float = 1.1


def assumed_efficiency(device: Device) -> Efficiency:
    """The device's own shares; assumed are 80 % of bandwidths, 15 kernels of 4 µs a layer, 15 µs a collective.

    The slack is what one printed figure shows beyond the sum of its parts: 4.068 s for a step of a 7B language model
    alone (DIP, arXiv 2504.14145, section 2; ``benchmarks/published.py`` holds that row out).
    """
    return Efficiency(dense=device.dense, attention=device.attention)


def product_seconds(
    rows: FloatArray,
    columns: float,
    inner: FloatArray | float,
    device: Device,
    share: Efficiency,
    width: int,
    groups: int = 1,
) -> FloatArray:
    """Time of the product of ``[rows, inner]`` and ``[inner, columns]``: the slower of computing and of memory.

    Computing is slowed by the last wave of tiles, which leaves half of the processors idle on average, since packed
    microbatches differ in length; a product of less than a wave takes as long as one.

    Args:
        rows: rows of the result, of each group.
        columns: columns of the result.
        inner: the dimension that is summed over.
        device: where.
        share: how much of its peaks is reached.
        width: bytes of a number.
        groups: equal products side by side, such as those of experts.
    """
    waves = groups * (rows / TILE) * (columns / TILE) / device.units
    full = waves / np.maximum(1.0, waves + 0.5)
    computing = groups * 2.0 * rows * columns * inner / (peak(device, width) * share.dense * full)
    moved = groups * width * (rows * inner + inner * columns + rows * columns)
    moving: FloatArray = moved / (device.memory_bandwidth * share.memory)
    slower: FloatArray = np.maximum(computing, moving)
    return slower


def peak(device: Device, width: int) -> float:
    """FLOP/s on paper with numbers of ``width`` bytes."""
    return device.peak if width <= 2 else device.peak_float32
