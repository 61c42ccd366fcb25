"""A rank's part of a tensor, on its way from the file into a DTensor, or from a DTensor to the file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from flowtrain_lightning.parallel.regions import Region, local_region


@dataclass(frozen=True)
class LocalShard:
    """A rank's part of a tensor.

    Attributes:
        part: the numbers, on the CPU.
        region: where they belong.
        shape: of the whole tensor.
    """

    part: Tensor
    region: Region
    shape: tuple[int, ...]


def local_part(value: Tensor | LocalShard, target: DTensor) -> Tensor:
    """The part of a value that a rank holds under the layout of ``target``.

    Args:
        value: the whole tensor, or this rank's part of it.
        target: in whose layout it is wanted.

    Raises:
        RuntimeError: the whole has another shape.
    """
    refuse_other_shape(value.shape, target.shape)
    region = local_region(target)
    if isinstance(value, LocalShard):
        assert value.region == region, "it was read for the layout in which it is wanted"
        return value.part
    return value[region.within(Region((0,) * value.ndim, tuple(value.shape)))]


def in_layout_of(value: Tensor | LocalShard, target: DTensor) -> DTensor:
    """A DTensor with the mesh and placements of ``target``."""
    return DTensor.from_local(
        local_part(value, target),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def run_within(value: Tensor | LocalShard, start: int, size: int) -> Tensor:
    """A run of a tensor's elements, in their order.

    Args:
        value: the whole tensor, or rows of it among which the run is.
        start: the first element's number in the whole tensor, counted row by row.
        size: how many.
    """
    rows = value.part if isinstance(value, LocalShard) else value
    above = value.region.offsets[0] if isinstance(value, LocalShard) and value.shape else 0
    first = start - above * math.prod(value.shape[1:])
    return rows.reshape(-1)[first : first + size]


def refuse_other_shape(saved: Sequence[int], wanted: Sequence[int]) -> None:
    """Raises where a checkpoint's tensor has another shape than that of the module.

    Raises:
        RuntimeError: has both.
    """
    if tuple(saved) != tuple(wanted):
        raise RuntimeError(
            f"the checkpoint's tensor has shape {tuple(saved)}, but that of the module has {tuple(wanted)}"
        )
