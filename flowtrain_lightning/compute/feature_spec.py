"""The shape and type of rows that pass through the pool, by which bytes are reserved for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowtrain_lightning.data import Features
from flowtrain_lightning.pool import entry_nbytes


@dataclass(frozen=True)
class FeatureSpec:
    """Shape and type of one row of features.

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

    def describes(self, features: tuple[Tensor, ...]) -> bool:
        """Whether rows of these features are of this kind."""
        if len(features) != len(self.shapes):
            return False
        for feature, shape, dtype in zip(features, self.shapes, self.dtypes, strict=True):
            if feature.dtype != dtype or feature.shape[1:] != shape:
                return False
        return True

    def no_rows(self, device: torch.device) -> tuple[Tensor, ...]:
        """Features of no media item, on a device."""
        return tuple(
            torch.empty((0, *shape), dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def entry_nbytes(self, rows: Sequence[int]) -> list[int]:
        """Bytes of the pool that entries of so many rows take."""
        widths = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        return [entry_nbytes([count * width for width in widths]) for count in rows]

    def __str__(self) -> str:
        return " and ".join(f"{list(shape)} {dtype}" for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


FeatureSpecs = Mapping[str, FeatureSpec]
"""Modality -> what a row of its features is."""


def as_features(modality: str, tensors: tuple[Tensor, ...]) -> Features:
    """Features as ``merge`` gets them: a tensor, or a tuple where the encoder returned several."""
    return {modality: tensors[0] if len(tensors) == 1 else tensors}
