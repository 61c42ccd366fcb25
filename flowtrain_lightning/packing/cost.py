"""What it costs to compute a packed set of sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.packing.plan import IntArray


@dataclass(frozen=True)
class CostModel:
    """Cost of a packed set of sequences with lengths ``l``: ``linear * sum(l) + quadratic * sum(l**2) + constant``.

    The linear term stands for everything that is done token by token, the quadratic one for attention inside a
    sequence, the constant for what a forward costs however little it computes. Packing compares costs, so the unit
    is free as long as the three share it.

    Raises:
        ValueError: a coefficient is negative, infinite or not a number.
    """

    linear: float
    quadratic: float
    constant: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"The {field.name} coefficient of a cost model is {value}; it must be a finite number >= 0."
                )

    def of_each(self, lengths: IntArray) -> NDArray[np.float64]:
        """``[sequences]`` what each sequence adds to the set it is packed into; the constant is not among it."""
        exact = lengths.astype(np.float64)
        return self.linear * exact + self.quadratic * exact * exact

    def of_set(self, lengths: IntArray) -> float:
        """The cost of computing all sequences of ``lengths`` as one packed set."""
        return float(self.of_each(lengths).sum()) + self.constant


DEFAULT_COST = CostModel(linear=1.0, quadratic=1.0 / 24_576, constant=0.0)
"""Attention equals the rest of the work at 24,576 tokens, as in a decoder of hidden size 4,096 (six times that)."""
