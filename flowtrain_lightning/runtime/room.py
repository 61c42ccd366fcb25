"""How much room in the pool a plan needs, and how much it is given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.pool import entry_room

LEAST_ARENA = 16 << 20
"""Bytes of an arena that nobody asked to be smaller."""


@dataclass(frozen=True)
class FeatureSpec:
    """What one row of features is.

    Attributes:
        shapes: shape of a row of each tensor.
        dtypes: dtype of each tensor.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, features: tuple[Tensor, ...]) -> FeatureSpec:
        """The spec of some features."""
        return cls(tuple(tuple(f.shape[1:]) for f in features), tuple(f.dtype for f in features))

    def batch_room(self, rows: list[int]) -> int:
        """Bytes that an encoder batch takes, given the rows of each of its entries."""
        return sum(entry_room([count * width for width in self._row_bytes]) for count in rows)

    @cached_property
    def _row_bytes(self) -> list[int]:
        return [math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]


def least_room(plan: StepPlan, spec: FeatureSpec) -> int:
    """Bytes of the smallest segment with which the fixed order cannot block: the largest encoder batch.

    Readers take features in the order in which encoder ranks publish them (the invariant of
    ``StepPlan.encoder_batches``), copy them when they arrive and give the room back at once. So all that was
    published before a waiting batch is read without it, and its room becomes free. Gradients have an arena of the
    same size to themselves; an encoder lane copies them whenever it has its turn.
    """
    return max(_rooms(plan, spec).values(), default=0)


def step_room(plan: StepPlan, spec: FeatureSpec) -> int:
    """Bytes with which no rank ever waits for room inside the step: all features of the busiest encoder rank."""
    per_rank = [0] * len(plan.encoder_batches)
    for (rank, _), room in _rooms(plan, spec).items():
        per_rank[rank] += room
    return max(per_rank)


def _rooms(plan: StepPlan, spec: FeatureSpec) -> dict[tuple[int, int], int]:
    rooms: dict[tuple[int, int], int] = {}
    for entry in plan.entries:
        batch = entry.encoder_rank, entry.encoder_batch
        rooms[batch] = rooms.get(batch, 0) + spec.batch_room([entry.rows])
    return rooms
