"""FLOPs of a half, forward and backward: causal attention halved, packing respected, frozen parts left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.module_parts import Dense, Layers

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

FLASH_BACKWARD = 2.5
"""Attention's backward over its forward. Five matrix products against two: a fused kernel computes the scores again
(FlashAttention-2, arXiv 2307.08691, section 4.1; torch's FlopCounterMode counts the same)."""

MODEL_BACKWARD = 2.0
"""Attention's backward over its forward without the repeated product, as MFU counts it (PaLM, arXiv 2204.02311,
appendix B)."""


@dataclass(frozen=True)
class FlopCount:
    """FLOPs, told apart by what does them, since the two reach different shares of a device's peak.

    Attributes:
        dense: products with weights.
        attention: products of queries, keys and values.
    """

    dense: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        """All FLOPs."""
        return self.dense + self.attention

    def __add__(self, other: FlopCount) -> FlopCount:
        return FlopCount(self.dense + other.dense, self.attention + other.attention)

    def __mul__(self, times: float) -> FlopCount:
        return FlopCount(self.dense * times, self.attention * times)


@dataclass(frozen=True)
class _Product:
    """One operation: FLOPs of its forward, and whether it has weights that train."""

    flops: FlopCount
    trainable: bool
    unused: bool


def attended_pairs(lengths: IntArray, causal: bool, window: int | None) -> float:
    """Pairs of a query and a key that attention inside packed sequences computes: Σ l², never (Σ l)².

    Args:
        lengths: ``[sequences]`` tokens of each.
        causal: a token attends to itself and what is before it, which halves the square.
        window: with ``causal`` each token sees so many at most (a sliding window); else sequences are cut into blocks
            of so many.
    """
    return float(pairs_of_each(lengths, causal, window).sum())


def pairs_of_each(lengths: IntArray, causal: bool, window: int | None) -> FloatArray:
    """``[sequences]`` the same for each sequence."""
    exact = lengths.astype(np.float64)
    if causal:
        reach = exact if window is None else np.minimum(exact, window)
        return np.asarray(reach * (reach + 1) / 2 + (exact - reach) * reach)
    if window is None:
        return np.asarray(exact * exact)
    blocks, rest = np.divmod(exact, window)
    return np.asarray(blocks * window * window + rest * rest)


def forward_flops(half: Half, lengths: IntArray) -> FlopCount:
    """FLOPs of a forward over packed sequences.

    Args:
        half: the encoder or backbone.
        lengths: ``[sequences]`` tokens of each that attend to each other: those of a sample, or patches of a picture.
    """
    return sum((product.flops for product in _products(half, lengths)), FlopCount())


def backward_flops(
    half: Half, lengths: IntArray, receives_gradient: bool = False, attention_factor: float = FLASH_BACKWARD
) -> FlopCount:
    """FLOPs of the backward over packed sequences.

    A product costs its forward once for its weights' gradient, if they train, and once for its input's gradient, if
    anything before it trains.

    Args:
        half: the encoder or backbone.
        lengths: ``[sequences]`` tokens of each.
        receives_gradient: something before this half trains, so that gradients must leave it.
        attention_factor: attention's backward over its forward; `MODEL_BACKWARD` for MFU.
    """
    flows = receives_gradient
    total = FlopCount()
    for product in _products(half, lengths):
        if product.unused:
            continue
        times = int(product.trainable) + int(flows)
        total += FlopCount(product.flops.dense * times, product.flops.attention * attention_factor * flows)
        flows = flows or product.trainable
    return total


def model_flops(half: Half, lengths: IntArray, receives_gradient: bool = False) -> float:
    """FLOPs that training must spend on sequences of ``lengths``, ``[sequences]``: what MFU sets against the peak."""
    backward = backward_flops(half, lengths, receives_gradient, MODEL_BACKWARD)
    return forward_flops(half, lengths).total + backward.total


def _products(half: Half, lengths: IntArray) -> Iterator[_Product]:
    """Every product of the half in the order of the data; a layer's matrices between attention and attention as one."""
    tokens = float(lengths.sum())
    for part in half.parts:
        if isinstance(part, Layers):
            yield from _layer_products(part, lengths + half.extra_tokens)
        elif isinstance(part, Dense):
            flops = 2.0 * part.inputs * part.outputs * part.copies * part.per_token * tokens
            yield _Product(FlopCount(dense=flops), part.trainable, False)
        else:
            yield _Product(FlopCount(), part.trainable, False)


def _layer_products(part: Layers, lengths: IntArray) -> Iterator[_Product]:
    tokens = float(lengths.sum())
    entry = FlopCount(dense=2.0 * part.hidden * (part.query_width + 2 * part.key_value_width) * tokens)
    pairs = attended_pairs(lengths, part.causal, part.window)
    attention = FlopCount(attention=4.0 * part.query_width * pairs)
    leave = part.query_width + (3 if part.gated else 2) * part.active_feed_forward
    if part.experts is not None:
        leave += part.experts.count
    adapters = FlopCount(dense=2.0 * part.adapters * part.adapted_width * tokens)
    for _ in range(part.count):
        if part.adapters:
            yield _Product(adapters, True, part.unused)
        yield _Product(entry, part.trainable, part.unused)
        yield _Product(attention, False, part.unused)
        yield _Product(FlopCount(dense=2.0 * part.hidden * leave * tokens), part.trainable, part.unused)
