"""The features of an encoder batch that are kept already, and the names under which the others will be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flowtrain_lightning.data.features.feature_store import FeatureStore


@dataclass(frozen=True)
class KeptRows:
    """The media items of an encoder batch, some of whose features were found in a store.

    Attributes:
        store: where they are kept.
        items: ``[media items]`` the name of each.
        rows: ``[media items]`` rows of features of each.
        features: ``[media items]`` ``[rows, ...]`` each; None of one that has to be encoded.
        seconds: that it took to read them.
    """

    store: FeatureStore
    items: tuple[str, ...]
    rows: tuple[int, ...]
    features: tuple[tuple[Tensor, ...] | None, ...]
    seconds: float = 0.0

    @classmethod
    def found(cls, store: FeatureStore, items: Sequence[str], rows: Sequence[int]) -> KeptRows:
        """Reads what is kept of these media items now."""
        start = time.monotonic()
        features = tuple(store.read(item, count) for item, count in zip(items, rows, strict=True))
        return cls(store, tuple(items), tuple(rows), features, time.monotonic() - start)

    @property
    def nbytes(self) -> int:
        """Bytes of the features that were read."""
        return sum(each.nbytes for of_item in self.features for each in of_item or ())

    @property
    def missing(self) -> list[int]:
        """The places of the media items that have to be encoded."""
        return [place for place, features in enumerate(self.features) if features is None]
