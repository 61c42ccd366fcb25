"""Where waiting cannot help: samples dearer than a mean microbatch, and into how many parts to split them."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.errors import PackingError
from flowtrain_lightning.packing.plan import IntArray


def context_parts(tokens: IntArray, cost: CostModel, *, microbatches: int) -> IntArray:
    """Into how many parts context parallelism would have to split each sample of a step.

    A sample that alone costs more than the step's mean microbatch makes all other ranks wait, however the samples are
    packed. Split evenly over so many ranks, each of its parts costs no more than a mean microbatch. Packing itself
    never splits a sequence: this is what a layout with context parallelism would be chosen by.

    Args:
        tokens: ``[samples]`` of a step.
        cost: what a packed set of sequences costs.
        microbatches: of the step, over all ranks.

    Returns:
        ``[samples]`` parts, a power of two because context parallel groups are; 1 for whatever needs no split.

    Raises:
        PackingError: the step has less than one microbatch.
    """
    if microbatches < 1:
        raise PackingError(f"A step has {microbatches} microbatches; it must have at least 1.")
    costs = cost.of_each(tokens)
    mean = costs.sum() / microbatches
    if mean == 0:
        return np.ones(len(tokens), dtype=np.int64)
    parts: IntArray = np.exp2(np.ceil(np.log2(np.maximum(1.0, costs / mean) * (1 - 1e-12)))).astype(np.int64)
    return parts
