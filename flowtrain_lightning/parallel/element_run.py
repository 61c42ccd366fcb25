"""A run of a tensor's elements: what a rank holds where ranks share a tensor whatever its rows are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from flowtrain_lightning.parallel.regions import Region, regions_of_run


@dataclass(frozen=True)
class ElementRun:
    """What one rank holds of a tensor whose elements ranks share in their order.

    Attributes:
        part: the elements, one-dimensional.
        start: the first one's number, counted row by row.
        shape: of the whole tensor.
    """

    part: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def boxes(self) -> Iterator[tuple[Region, Tensor]]:
        """The boxes that the run is made of, and their elements."""
        done = 0
        for region in regions_of_run(self.shape, self.start, self.part.numel()):
            yield region, self.part[done : done + region.elements].view(region.sizes)
            done += region.elements
