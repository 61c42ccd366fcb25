"""A run of a tensor's elements, on its way from a rank's optimizer to the file, or back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from flowtrain_lightning.checkpoint.local_shard import LocalShard
from flowtrain_lightning.parallel.optimizer_share import OptimizerShare
from flowtrain_lightning.parallel.regions import Region, regions_of_run


@dataclass(frozen=True)
class ElementRun:
    """What one rank holds of a tensor whose elements ranks share in their order, whatever its rows are.

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


def run_within(value: Tensor | LocalShard, share: OptimizerShare) -> Tensor:
    """The elements of a share.

    Args:
        value: the whole tensor, or rows of it among which the share is.
        share: of a tensor of this shape.
    """
    rows = value.part if isinstance(value, LocalShard) else value
    above = value.region.offsets[0] if isinstance(value, LocalShard) and share.shape else 0
    first = share.start - above * math.prod(share.shape[1:])
    return rows.reshape(-1)[first : first + share.size]
