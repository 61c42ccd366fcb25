"""A rank's part of a tensor, on its way from the file into a DTensor, or from a DTensor to the file."""

from __future__ import annotations

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
    if tuple(value.shape) != tuple(target.shape):
        raise RuntimeError(
            f"the checkpoint's tensor has shape {tuple(value.shape)}, but that of the module has {tuple(target.shape)}"
        )
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
