"""Whether `encode` takes moments and tiles apart, as a module says of itself: only then are media cut in pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flowtrain_lightning.packing_check import findings as say
from flowtrain_lightning.packing_check.findings import Finding
from flowtrain_lightning.packing_check.passes import FeaturesOfItems, Passes
from flowtrain_lightning.packing_check.rounding import EXACT
from flowtrain_lightning.packing_check.samples import Item

_EXACT_IN_FLOAT32 = 1e-4


def parts_finding(passes: Passes, items: Sequence[Item], features: FeaturesOfItems) -> Finding | None:
    """Compares the rows of every part, each a media item, with those that `encode` gives within the whole.

    Args:
        passes: of the module.
        items: of one modality.
        features: of each of them alone.

    Returns:
        what to say where they differ; None where they are alike, or nothing has several parts.
    """
    several = [item for item in items if passes.parts_of(item) > 1]
    if not several:
        return None
    tolerance = EXACT if passes.dtype == torch.float64 else _EXACT_IN_FLOAT32
    error = 0.0
    for item, rows in passes.encode_parts(several).items():
        for found, expected in zip(rows, features[item], strict=True):
            largest = max(float(expected.abs().max()), 1e-30)
            distance = float((found - expected).abs().max())
            error = max(error, distance / largest if math.isfinite(distance) else math.inf)  # NaN is above no bound
    return Finding("parts", say.PARTS_DIFFER.format(error=error)) if error > tolerance else None
