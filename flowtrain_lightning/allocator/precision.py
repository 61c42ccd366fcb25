"""Bytes that a parameter and an activation take, by Lightning's names of precisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """Bytes per number, with AdamW as the optimizer.

    Attributes:
        weights: of a weight that is kept.
        copies: of a weight's copy in the computing type, such as autocast makes; 0 where weights are computed with.
        gradients: of a gradient.
        states: of the optimizer: two moments, and a master weight where there is one.
        computing: of an activation, and of a weight that is sent.
    """

    weights: int
    copies: int
    gradients: int
    states: int
    computing: int


PRECISIONS: Mapping[str, Precision] = {
    "32-true": Precision(weights=4, copies=0, gradients=4, states=8, computing=4),
    "bf16-mixed": Precision(weights=4, copies=2, gradients=4, states=8, computing=2),
    "bf16-true": Precision(weights=2, copies=0, gradients=2, states=4, computing=2),
    "bf16-master": Precision(weights=2, copies=0, gradients=4, states=12, computing=2),
}
"""Name -> bytes. ``bf16-master`` is Megatron-LM's: bf16 weights, float32 gradients, master weights and moments."""
