"""Regions of tensors that ranks hold, and what they make together: plain arithmetic on offsets and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Region:
    """A box within a tensor.

    Attributes:
        offsets: where it begins, in each dimension.
        sizes: how long it is, in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The count of numbers in it; 1 in that of a scalar."""
        return math.prod(self.sizes)

    def overlap(self, other: Region) -> Region | None:
        """The intersection, or None."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, _ends(self), _ends(other))
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Region(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Region) -> tuple[slice, ...]:
        """The index of this region in a tensor that holds ``outer``."""
        starts = [own - other for own, other in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def split(self, most_elements: int) -> Iterator[Region]:
        """Regions of at most so many elements, or of one row, cut along the first dimension that can be cut."""
        dim = next((dim for dim, size in enumerate(self.sizes) if size > 1), None)
        if dim is None or self.elements <= most_elements:
            yield self
            return
        step = max(1, most_elements // (self.elements // self.sizes[dim]))
        for start in range(0, self.sizes[dim], step):
            sizes = (*self.sizes[:dim], min(step, self.sizes[dim] - start), *self.sizes[dim + 1 :])
            offsets = (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :])
            yield Region(offsets, sizes)


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region((0,) * len(shape), tuple(shape))


def regions_of_run(shape: Sequence[int], start: int, size: int) -> Iterator[Region]:
    """Boxes that hold a run of a tensor's elements, in their order.

    Args:
        shape: of the tensor.
        start: the first element, counted row by row.
        size: how many.
    """
    if size == 0:
        return
    if len(shape) < 2:
        yield Region((start,) * len(shape), (size,) * len(shape))
        return
    row = math.prod(shape[1:])
    number, within = divmod(start, row)
    if within or size < row:
        done = min(row - within, size)
        for box in regions_of_run(shape[1:], within, done):
            yield Region((number, *box.offsets), (1, *box.sizes))
    else:
        done = size - size % row
        yield Region((number, *(0 for _ in shape[1:])), (done // row, *shape[1:]))
    yield from regions_of_run(shape, start + done, size - done)


def rows_around_run(shape: Sequence[int], start: int, size: int) -> Region:
    """The rows that a run of a tensor's elements touches, as one box; see `regions_of_run`."""
    if not shape:
        return whole(shape)
    row = max(1, math.prod(shape[1:]))
    first, end = start // row, -(-(start + size) // row)
    return Region((first, *(0 for _ in shape[1:])), (end - first if size else 0, *shape[1:]))


def local_region(tensor: Tensor) -> Region:
    """The region of a tensor that this rank holds: all of it, or its part of a DTensor.

    Raises:
        ValueError: the rank holds a summand of the tensor only, or it was cut in another way than here.
    """
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    region = _held(tensor)
    if region.sizes != tuple(tensor.to_local().shape):
        raise ValueError(
            f"A DTensor of shape {tuple(tensor.shape)} and placements {tensor.placements} should hold "
            f"{region.sizes} here, but holds {tuple(tensor.to_local().shape)}. Make it by distribute_tensor, "
            "parallelize_module or fully_shard."
        )
    return region


def cover_exactly_once(shape: Sequence[int], regions: Sequence[Region]) -> bool:
    """Whether each number of a tensor lies in one region, and no region lies outside."""
    dims = len(shape)
    if any(len(region.offsets) != dims or len(region.sizes) != dims for region in regions):
        return False
    if sum(region.elements for region in regions) != math.prod(shape):
        return False
    starts = np.array([region.offsets for region in regions], dtype=np.int64).reshape(len(regions), dims)
    sizes = np.array([region.sizes for region in regions], dtype=np.int64).reshape(len(regions), dims)
    ends = starts + sizes
    if (starts < 0).any() or (sizes < 1).any() or (ends > np.array(shape, dtype=np.int64)).any():
        return False
    overlaps = np.ones((len(regions), len(regions)), dtype=bool)
    for dim in range(dims):
        overlaps &= (starts[:, None, dim] < ends[None, :, dim]) & (starts[None, :, dim] < ends[:, None, dim])
    return int(overlaps.sum()) == len(regions)  # each overlaps itself


def _ends(region: Region) -> tuple[int, ...]:
    return tuple(offset + size for offset, size in zip(region.offsets, region.sizes, strict=True))


def _held(tensor: DTensor) -> Region:
    """Returns the region of a DTensor at this rank's coordinate in the mesh.

    FSDP2 over divided layers cuts what tensor ranks have left of a dimension, though its own dimension of the mesh
    comes first: its placement has a ``split_factor`` then.
    """
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    cuts = [(dim, placed) for dim, placed in enumerate(tensor.placements) if not placed.is_replicate()]
    for dim, placed in sorted(cuts, key=lambda cut: hasattr(cut[1], "split_factor")):
        if placed.is_partial():
            raise ValueError(
                f"A DTensor of shape {tuple(tensor.shape)} is a sum that is still outstanding ({tensor.placements}). "
                "Redistribute it before it is saved or loaded."
            )
        along, index = placed.dim, tensor.device_mesh.get_local_rank(dim)  # type: ignore[attr-defined]
        longest = -(-sizes[along] // tensor.device_mesh.size(dim))  # as torch.chunk
        start = min(index * longest, sizes[along])
        offsets[along] += start
        sizes[along] = min(longest, sizes[along] - start)
    return Region(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class ElementRun:
    """A run of elements that one rank holds of a tensor.

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


@dataclass(frozen=True)
class OptimizerShare:
    """The run of a parameter's elements that a rank's optimizer steps, where ranks share that work and not the weights.

    It lies in a flat tensor among those of other parameters.

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
