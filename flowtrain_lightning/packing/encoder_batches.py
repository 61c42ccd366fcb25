"""Media to encoder batches, alike in cost on all encoder ranks, in the order in which the backbone wants them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowtrain_lightning.packing.dealing import deal_media
from flowtrain_lightning.packing.plan import FloatArray, IntArray, StepPlan


def pack_encoder_batches(
    patches: IntArray,
    backbone_rank: IntArray,
    microbatch: IntArray,
    *,
    encoder_ranks: int,
    patch_budget: int | None,
    costs: FloatArray | None = None,
    colocated_encoder_ranks: Sequence[int] | None = None,
) -> tuple[tuple[IntArray, ...], ...]:
    """Deal the media of one position after another to the encoder ranks, to the one with the least work so far.

    A batch holds media of one position only, so the position of the reading microbatches never falls on a rank, and
    inside a batch the media of one reader are adjacent. Ties are broken by index.

    Args:
        patches: ``[media]`` encoder patches, none above ``patch_budget``.
        backbone_rank: ``[media]`` who reads each media.
        microbatch: ``[media]`` the position at which it is read.
        encoder_ranks: ranks of the encoder role.
        patch_budget: the most patches of one batch; None makes one batch per rank and position.
        costs: ``[media]`` what encoding each costs; None takes the patches.
        colocated_encoder_ranks: for each backbone rank the encoder rank on the same rank, or -1: there its media are
            encoded unless balance moves them. None where no rank does both.

    Returns:
        ``[encoder rank][position]`` -> media numbers. No batch is empty, so ranks may differ in their number.
    """
    costs = patches.astype(np.float64) if costs is None else costs
    order = np.lexsort((-costs, microbatch))
    home = np.full(len(patches), -1, dtype=np.int64)
    if colocated_encoder_ranks is not None:
        home = np.array(colocated_encoder_ranks, dtype=np.int64)[backbone_rank]
    encoder_rank = deal_media(costs, order, home, encoder_ranks)
    by_batch = np.lexsort((backbone_rank, microbatch, encoder_rank))
    changes = (np.diff(encoder_rank[by_batch]) != 0) | (np.diff(microbatch[by_batch]) != 0)
    batches: list[list[IntArray]] = [[] for _ in range(encoder_ranks)]
    for group in np.split(by_batch, np.flatnonzero(changes) + 1):
        if len(group):
            batches[int(encoder_rank[group[0]])] += _split(group, patches, patch_budget)
    return tuple(tuple(of_rank) for of_rank in batches)


def moved_rows(plan: StepPlan, colocated_encoder_ranks: Sequence[int] | None = None) -> int:
    """Rows of features that one rank encodes and another one reads; with gradients, as many come back.

    Args:
        plan: the step.
        colocated_encoder_ranks: as in :func:`pack_encoder_batches`.
    """
    return sum(
        entry.rows
        for entry in plan.entries
        if colocated_encoder_ranks is None or colocated_encoder_ranks[entry.backbone_rank] != entry.encoder_rank
    )


def local_encoder_batches(
    backbone_rank: IntArray, microbatch: IntArray, *, ranks: int, microbatches: int
) -> tuple[tuple[IntArray, ...], ...]:
    """Encode where it is read: batch ``i`` of rank ``r`` holds the media of microbatch ``i`` of rank ``r``, or none.

    Args:
        backbone_rank: ``[media]`` who reads each media.
        microbatch: ``[media]`` the position at which it is read.
        ranks: ranks, each of which encodes and reads.
        microbatches: microbatches of each rank.
    """
    return tuple(
        tuple(
            np.flatnonzero((backbone_rank == rank) & (microbatch == position)).astype(np.int64)
            for position in range(microbatches)
        )
        for rank in range(ranks)
    )


def _split(media: IntArray, patches: IntArray, patch_budget: int | None) -> list[IntArray]:
    """Cut ``media`` into runs of at most ``patch_budget`` patches, each as long as it can be."""
    if patch_budget is None:
        return [media]
    cuts: list[int] = []
    filled = 0
    for place, size in enumerate(patches[media].tolist()):
        if filled + size > patch_budget:
            cuts.append(place)
            filled = 0
        filled += size
    return np.split(media, cuts)
