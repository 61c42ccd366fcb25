"""How much room in the pool a plan needs, and how much it is given."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.pool import Reservation, assign_offsets, entry_nbytes

LEAST_PART = 16 << 20
"""Bytes of a part of the pool that nobody asked to be smaller."""


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

    def room(self, rows: int) -> int:
        """Bytes that an entry of so many rows takes."""
        return entry_nbytes([rows * width for width in self._row_bytes])

    def __str__(self) -> str:
        return " and ".join(f"{list(shape)} {dtype}" for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @cached_property
    def _row_bytes(self) -> list[int]:
        return [math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]


def feature_order(plan: StepPlan, spec: FeatureSpec, batches: Iterable[Sequence[int]]) -> dict[int, Reservation]:
    """What an encoder rank reserves for the features of its encoder batches, each given as the numbers of its entries.

    A batch is put as a whole, so its entries are held together. No other is: readers take features in the order in
    which encoder ranks publish them (the invariant of ``StepPlan.encoder_batches``), copy them when they arrive and
    give the room back at once, so all that was published before a waiting batch is read without it.

    Returns:
        Number of the entry -> its reservation, in the order in which the entries will be put.
    """
    order: dict[int, Reservation] = {}
    for entries in batches:
        last = len(order) + len(entries) - 1
        for number in entries:
            order[number] = Reservation(spec.room(plan.entries[number].rows), last)
    return order


def gradient_order(plan: StepPlan, spec: FeatureSpec, entries: Iterable[int]) -> dict[int, Reservation]:
    """What a backbone rank reserves for the gradients of the features of ``entries``, in that order.

    An encoder lane copies gradients whenever it has its turn, so none is held until another one was put.

    Returns:
        Number of the entry -> its reservation.
    """
    return {
        number: Reservation(spec.room(plan.entries[number].rows), position) for position, number in enumerate(entries)
    }


def least_room(plan: StepPlan, spec: FeatureSpec) -> int:
    """Bytes with which the fixed order of a step cannot block, on any rank.

    Gradients have as much room of their own; as less of them is held together than of features, it is enough.
    """
    orders = [feature_order(plan, spec, batches) for batches in _batches(plan)]
    return max(assign_offsets(list(order.values())).capacity for order in orders)


def step_room(plan: StepPlan, spec: FeatureSpec) -> int:
    """Bytes with which no rank waits for room inside a step: all features of the busiest encoder rank."""
    rows = [[plan.entries[number].rows for batch in batches for number in batch] for batches in _batches(plan)]
    return max(sum(map(spec.room, of_rank)) for of_rank in rows)


def _batches(plan: StepPlan) -> list[list[list[int]]]:
    """For each encoder rank the numbers of the entries of each of its batches."""
    found: list[dict[int, list[int]]] = [defaultdict(list) for _ in plan.encoder_batches]
    for number, entry in enumerate(plan.entries):
        found[entry.encoder_rank][entry.encoder_batch].append(number)
    return [list(batches.values()) for batches in found]
