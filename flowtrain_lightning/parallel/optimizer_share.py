"""Which part of a parameter a rank's optimizer steps, where ranks share that work and not the weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class OptimizerShare:
    """A run of a parameter's elements, which lies in a flat tensor among those of other parameters.

    Attributes:
        flat: one-dimensional; what the optimizer steps in place of the parameters.
        shape: of the parameter.
        offset: where the run begins in ``flat``.
        start: the run's first element, as the parameter's are counted row by row.
        size: its elements; 0 where other ranks step the whole parameter.
    """

    flat: Tensor
    shape: tuple[int, ...]
    offset: int
    start: int
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """The run within a tensor that is laid out as ``flat`` is, for example an entry of the optimizer's state."""
        return tensor[self.offset : self.offset + self.size]
