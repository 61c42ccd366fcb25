"""The microbatches of a step onto the ranks of a layout: other ranks, same samples."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.errors import PackingError
from flowtrain_lightning.packing.evening import even_out
from flowtrain_lightning.packing.microbatches import SyncEvery, deal_to_ranks, group_alike, level_ranks
from flowtrain_lightning.packing.plan import FloatArray, IntArray


def arrange(
    tokens: IntArray,
    costs: FloatArray,
    bin_of: IntArray,
    *,
    bins: int,
    width: int,
    ranks: int,
    budget: int,
    sync_every: SyncEvery,
) -> IntArray:
    """Deal a step's microbatches, made as rows of ``width``, to ``ranks`` ranks.

    Samples may change their microbatch, but none enters or leaves the step.

    Args:
        tokens: ``[samples]`` of the step.
        costs: ``[samples]`` cost of each.
        bin_of: ``[samples]`` the microbatch of each, ``row * width + column``.
        bins: microbatches of the step.
        width: the canonical width of a row.
        ranks: backbone ranks of this layout.
        budget: the most tokens of a microbatch.
        sync_every: when ranks wait for each other.

    Returns:
        ``[samples]`` the microbatch of each, ``position * ranks + rank``.

    Raises:
        PackingError: the ranks do not divide the microbatches.
    """
    if bins % ranks:
        raise PackingError(
            f"A step of {bins} microbatches cannot be dealt evenly to {ranks} ranks; "
            f"choose a number of ranks that divides {bins}."
        )
    rows = bins // ranks
    order = np.argsort(-tokens, kind="stable")
    tokens, costs, found = tokens[order], costs[order], bin_of[order]
    if sync_every == "microbatch":
        if ranks != width:
            found = group_alike(found, costs, rows, ranks)
            even_out(found, np.arange(bins) // ranks, rows, tokens, costs, bins, budget)
        found = level_ranks(found, costs, rows, ranks)
    else:
        found = level_ranks(found if ranks == width else group_alike(found, costs, rows, ranks), costs, rows, ranks)
        other = deal_to_ranks(tokens, costs, rows, ranks, budget)
        if other is not None and _longest(other, costs, ranks) < _longest(found, costs, ranks):
            found = other
    arranged = np.empty_like(found)
    arranged[order] = found
    return arranged


def _longest(bin_of: IntArray, costs: FloatArray, ranks: int) -> float:
    return float(np.bincount(bin_of % ranks, costs, minlength=ranks).max())
