"""Time of single kernels by the shape of their work: matrix products, fused attention, and what only moves data."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.allocator.coefficients import Efficiency
from flowtrain_lightning.allocator.devices import TILE, Device
from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.allocator.module_parts import Layers

HEAD_TILE = 32
"""Fused attention computes heads as if their width were a multiple of this (FlashAttention-2 pads to it)."""

ATTENTION_RAMP = 400
"""Tokens of a sequence at which fused attention reaches half of its rate (read from FlashAttention-2, arXiv
2307.08691, figure 5: forward and backward at 512 to 16k tokens)."""


def product_seconds(
    m: FloatArray,
    n: float,
    k: float,
    device: Device,
    share: Efficiency,
    width: int,
    groups: int = 1,
) -> FloatArray:
    """Time of the product of ``[m, k]`` and ``[k, n]``: the slower of computing and of moving data.

    Computing is slowed by the last wave of tiles, which leaves half of the processors idle on average, since packed
    microbatches differ in length; a product of less than a wave takes as long as one. Of products side by side each has
    a last tile of its own, half of which is empty on average: with a few hundred tokens an expert, that is a tenth.
    Grouped kernels lose nothing else to large products (91 % of an H800's peak: arXiv 2501.16103).

    Args:
        m: tokens, of each group.
        n: numbers in a vector of the result.
        k: the dimension that is summed over.
        device: where.
        share: how much of its peaks is reached.
        width: bytes of a number.
        groups: equal products side by side, such as those of experts.
    """
    rows = m if groups == 1 else m + TILE / 2 * np.minimum(1.0, m)
    waves = groups * rows * n / device.tile / device.units
    of_a_wave = 2.0 * device.tile * device.units * k / (device.peak_for(width) * share.dense)
    computing = np.maximum(1.0, waves + 0.5) * of_a_wave
    moving = moving_seconds(groups * width * (m * k + k * n + m * n), device, share)
    slower: FloatArray = np.maximum(computing, moving)
    return slower


def attention_seconds(
    part: Layers, pairs: FloatArray | float, tokens: FloatArray, device: Device, share: Efficiency, width: int
) -> FloatArray:
    """``[layouts]`` seconds of a layer's fused attention, forward; short sequences and heads below a tile are slow.

    Args:
        part: the layers.
        pairs: pairs of a query and a key that a mean token has.
        tokens: ``[layouts]`` on this device.
        device: where.
        share: how much of its peaks is reached.
        width: bytes of a number.
    """
    length = pairs * (1 + part.causal)
    filled = part.head_size / (-(-part.head_size // HEAD_TILE) * HEAD_TILE)
    rate = device.peak_for(width) * share.attention * filled * length / (length + ATTENTION_RAMP)
    return 4.0 * part.query_width * pairs * tokens / rate


def moving_seconds(moved: FloatArray, device: Device, share: Efficiency) -> FloatArray:
    """``[layouts]`` seconds in which ``moved``, ``[layouts]``, bytes are read and written."""
    return moved / (device.memory_bandwidth * share.memory)
