"""The plan of one step: sizes of samples in, who encodes and who reads what out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from flowtrain_lightning.packing.cost import DEFAULT_COST, CostModel
from flowtrain_lightning.packing.encoder_batches import local_encoder_batches, pack_encoder_batches
from flowtrain_lightning.packing.errors import PackingError
from flowtrain_lightning.packing.flowing import flow_rows
from flowtrain_lightning.packing.microbatches import SyncEvery, as_microbatches, pack_microbatches, positive_costs
from flowtrain_lightning.packing.order import flow_order
from flowtrain_lightning.packing.plan import FloatArray, IntArray, SampleSizes, StepPlan

Microbatches = tuple[tuple[IntArray, ...], ...]
"""``[backbone rank][position]`` -> sample numbers."""


def plan_step(
    sizes: SampleSizes,
    samples: IntArray,
    *,
    backbone_ranks: int,
    encoder_ranks: int,
    token_budget: int,
    patch_budget: int | None = None,
    local: bool = False,
    colocated_encoder_ranks: Sequence[int] | None = None,
    cost: CostModel = DEFAULT_COST,
    encoder_cost: CostModel | None = None,
    sync_every: SyncEvery = "microbatch",
    microbatches: Microbatches | None = None,
) -> StepPlan:
    """Plan one step. The same arguments give the same plan on every rank and machine.

    Args:
        sizes: sizes of ``samples``, in that order.
        samples: ``[n]`` indices into the data set, in sampler order.
        backbone_ranks: data-parallel ranks of the backbone role.
        encoder_ranks: data-parallel ranks of the encoder role.
        token_budget: the most tokens of one microbatch.
        patch_budget: the most patches of one encoder batch. A batch never holds more than the media that one encoder
            rank owes to one position of the microbatches, so None needs no number.
        local: every rank encodes just the media that it reads, one encoder batch (perhaps empty) per microbatch.
        colocated_encoder_ranks: for each backbone rank the encoder rank on the same rank, or -1: there its media are
            encoded unless balance moves them. None where no rank does both.
        cost: what a packed set of sequences costs the backbone.
        encoder_cost: what a set of media costs the encoder, by patches and in the unit of ``cost``: then media are
            dealt by it, the order of the microbatches is the one that makes the step shortest, and samples of equal
            length change places between positions where that makes it shorter still. None deals by patches, and
            orders by how much media a position reads.
        sync_every: when backbone ranks wait for each other.
        microbatches: the microbatches, if they are made already: they are put in order, and media dealt. None packs
            as many as are needed.

    Raises:
        PackingError: a number of ranks or a budget below 1, sizes of other samples, a sample over the token budget,
            a media over the patch budget, ``colocated_encoder_ranks`` of other ranks, or ``local`` with unequal numbers
            of ranks or with a patch budget.
    """
    _refuse_bad_settings(backbone_ranks, encoder_ranks, token_budget, patch_budget, local)
    _refuse_bad_homes(colocated_encoder_ranks, backbone_ranks, encoder_ranks)
    _refuse_what_does_not_fit(sizes, samples, token_budget, patch_budget)
    if microbatches is None:
        microbatches = pack_microbatches(
            sizes.tokens, ranks=backbone_ranks, token_budget=token_budget, cost=cost, sync_every=sync_every
        )
    if (
        encoder_cost is None or local or colocated_encoder_ranks is not None
    ):  # a rank with both lanes never waits for its own
        order = flow_order(_media_per_position(microbatches, sizes))
        microbatches = tuple(tuple(of_rank[position] for position in order) for of_rank in microbatches)
    else:
        microbatches = _in_flow(
            microbatches,
            sizes,
            encoder_ranks,
            token_budget,
            cost,
            encoder_cost.of_each(sizes.media_patches),
            sync_every,
        )
    rank, position = StepPlan(samples, sizes, microbatches, ()).readers
    if local:
        batches = local_encoder_batches(rank, position, ranks=backbone_ranks, microbatches=len(microbatches[0]))
    else:
        costs = None if encoder_cost is None else encoder_cost.of_each(sizes.media_patches)
        batches = pack_encoder_batches(
            sizes.media_patches,
            rank,
            position,
            encoder_ranks=encoder_ranks,
            patch_budget=patch_budget,
            costs=costs,
            colocated_encoder_ranks=colocated_encoder_ranks,
        )
    return StepPlan(samples, sizes, _by_arrival(microbatches, batches, sizes), batches)


def _by_arrival(
    microbatches: Microbatches, batches: tuple[tuple[IntArray, ...], ...], sizes: SampleSizes
) -> Microbatches:
    """The same microbatches, with sequences side by side whose features come from one encoder batch.

    What one batch hands to a microbatch is then copied in one piece. Sequences without media come first.
    """
    batch_of = np.zeros(len(sizes.media_rows), dtype=np.int64)
    for number, media in enumerate(batch for position in zip_longest(*batches) for batch in position):
        if media is not None:
            batch_of[media] = number
    arrival = np.full(len(sizes), -1)
    has_media = np.diff(sizes.media_start) > 0
    arrival[has_media] = batch_of[sizes.media_start[:-1][has_media]]
    return tuple(
        tuple(members[np.argsort(arrival[members], kind="stable")] for members in of_rank) for of_rank in microbatches
    )


def _in_flow(
    microbatches: Microbatches,
    sizes: SampleSizes,
    encoder_ranks: int,
    token_budget: int,
    cost: CostModel,
    media_costs: FloatArray,
    sync_every: SyncEvery,
) -> Microbatches:
    """The microbatches in the order that makes the step shortest, after exchanges that make it shorter still."""
    ranks, rows = len(microbatches), len(microbatches[0])
    bin_of = np.empty(len(sizes), dtype=np.int64)
    for rank, of_rank in enumerate(microbatches):
        for position, members in enumerate(of_rank):
            bin_of[members] = position * ranks + rank
    encoder = np.zeros(len(sizes))
    np.add.at(encoder, sizes.media_sample, media_costs)
    found = flow_rows(
        bin_of,
        sizes.tokens,
        positive_costs(sizes.tokens, cost),
        encoder,
        rows=rows,
        ranks=ranks,
        encoder_ranks=encoder_ranks,
        budget=token_budget,
        sync_every=sync_every,
    )
    return as_microbatches(found, rows, ranks)


def _media_per_position(microbatches: Microbatches, sizes: SampleSizes) -> IntArray:
    patches = np.zeros(len(sizes), dtype=np.int64)
    np.add.at(patches, sizes.media_sample, sizes.media_patches)
    return np.array([sum(patches[members].sum() for members in row) for row in zip(*microbatches, strict=True)])


def _refuse_bad_settings(
    backbone_ranks: int, encoder_ranks: int, token_budget: int, patch_budget: int | None, local: bool
) -> None:
    least_one = {"backbone_ranks": backbone_ranks, "encoder_ranks": encoder_ranks, "token_budget": token_budget}
    if patch_budget is not None:
        least_one["patch_budget"] = patch_budget
    for name, value in least_one.items():
        if value < 1:
            raise PackingError(f"{name} is {value}; it must be at least 1.")
    if local and backbone_ranks != encoder_ranks:
        raise PackingError(
            f"local=True lets every rank encode what it reads, but there are {backbone_ranks} backbone ranks and "
            f"{encoder_ranks} encoder ranks; make the numbers equal."
        )
    if local and patch_budget is not None:
        raise PackingError(
            "local=True ties every encoder batch to one microbatch, so patch_budget cannot split it; "
            "leave patch_budget out, or lower token_budget."
        )


def _refuse_bad_homes(colocated_encoder_ranks: Sequence[int] | None, backbone_ranks: int, encoder_ranks: int) -> None:
    if colocated_encoder_ranks is not None and (
        len(colocated_encoder_ranks) != backbone_ranks
        or not all(-1 <= home < encoder_ranks for home in colocated_encoder_ranks)
    ):
        raise PackingError(
            f"colocated_encoder_ranks is {tuple(colocated_encoder_ranks)}; it must name an encoder rank below "
            f"{encoder_ranks}, or -1, for each of the {backbone_ranks} backbone ranks."
        )


def _refuse_what_does_not_fit(
    sizes: SampleSizes, samples: IntArray, token_budget: int, patch_budget: int | None
) -> None:
    if len(sizes) != len(samples):
        raise PackingError(
            f"There are {len(samples)} samples but sizes of {len(sizes)}; give the sizes of each sample."
        )
    too_long = np.flatnonzero(sizes.tokens > token_budget)
    if len(too_long):
        first = int(too_long[0])
        start, end = sizes.media_start[first : first + 2].tolist()
        raise PackingError(
            f"Sample {samples[first]} has {sizes.tokens[first]} tokens ({sizes.media_rows[start:end].sum()} of them "
            f"from {end - start} media), more than the token budget of {token_budget}; "
            "raise the budget, or drop or shorten the sample."
        )
    if patch_budget is None:
        return
    too_large = np.flatnonzero(sizes.media_patches > patch_budget)
    if len(too_large):
        media = int(too_large[0])
        raise PackingError(
            f"A media of sample {samples[sizes.media_sample[media]]} has {sizes.media_patches[media]} patches, "
            f"more than the patch budget of {patch_budget}; raise the budget, or make the media smaller."
        )
