"""The plan of one step: sizes of samples in, who encodes and who reads what out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from flowtrain_lightning.packing.cost_model import DEFAULT_COST, CostModel
from flowtrain_lightning.packing.encoder_batches import (
    ENCODER_BUDGET,
    divided_by_modality,
    local_encoder_batches,
    pack_batches_of_encoders,
    pack_encoder_batches,
    within_budget,
)
from flowtrain_lightning.packing.microbatches import as_microbatches, pack_microbatches
from flowtrain_lightning.packing.order import media_order, order_step
from flowtrain_lightning.packing.shared_media import costs_once, encoded_as, side_by_side
from flowtrain_lightning.packing.step_plan import (
    EncoderBatches,
    FloatArray,
    IntArray,
    Microbatches,
    PackingError,
    SampleSizes,
    StepPlan,
    SyncEvery,
)


def plan_step(
    sizes: SampleSizes,
    samples: IntArray,
    *,
    backbone_ranks: int,
    encoder_ranks: int,
    token_budget: int,
    encoder_budget: int = ENCODER_BUDGET,
    encoders: Sequence[tuple[str, int]] = (),
    local: bool = False,
    colocated_lanes: Sequence[tuple[int, int]] = (),
    encoder_nodes: Sequence[int] = (),
    backbone_nodes: Sequence[int] = (),
    cost: CostModel = DEFAULT_COST,
    encoder_cost: CostModel | None = None,
    sync_every: SyncEvery = "microbatch",
    in_fixed_order: bool = False,
    microbatches: Microbatches | None = None,
) -> StepPlan:
    """Plan one step. The same arguments give the same plan on every rank and machine.

    Args:
        sizes: sizes of ``samples``, in that order.
        samples: ``[n]`` indices into the data set, in sampler order.
        backbone_ranks: data-parallel ranks of the backbone role.
        encoder_ranks: data-parallel ranks of the encoder role, or of all of them.
        token_budget: the most tokens of one microbatch.
        encoder_budget: the most patches of one encoder batch, save one of a single media item that has more.
        encoders: modality and ranks of each encoder, where there are several; ``()`` where one encoder takes all.
        local: every rank encodes just the media items that it reads, one encoder batch (perhaps empty) per microbatch
            and modality of the step, where the budget allows that.
        colocated_lanes: the encoder rank and the backbone rank of each process that has both: there the backbone rank's
            media items are encoded unless balance moves them. Where other encoder ranks only encode, these have
            precedence, as far as all then end the step together.
        encoder_nodes: the node of each encoder rank, so that media items are encoded near their readers; ``()`` where
            there is one.
        backbone_nodes: the node of each backbone rank; ``()`` where there is one.
        cost: what a packed set of sequences costs the backbone.
        encoder_cost: what a set of media items costs the encoder, by patches and in the unit of ``cost``. With it media
            items are dealt by cost, positions come in the order that makes the step shortest, and samples of equal
            length are swapped between positions where that makes it shorter still. None deals media items by patches,
            and orders positions by how much media they read; where some ranks only encode and others do both, a media
            item then is taken to cost the encoder what its rows cost the backbone.
        sync_every: how often backbone ranks wait for each other.
        in_fixed_order: ranks with both roles work in the fixed order of `taking_turns`, not as they can go on.
        microbatches: the microbatches, if they are made already: they are put in order, and media items dealt. None
            packs as many as are needed.

    Raises:
        PackingError: a number of ranks or a budget below 1, sizes of other samples, a sample over the token budget,
            ``colocated_lanes`` of other ranks, ``local`` with unequal numbers of ranks, or media that no encoder takes.
    """
    _refuse_bad_ranks(backbone_ranks, encoder_ranks, token_budget, encoder_budget, local, colocated_lanes)
    _refuse_bad_samples(sizes, samples, token_budget)
    if not local:
        _refuse_other_modalities(sizes, [modality for modality, _ in encoders])
    if microbatches is None:
        microbatches = pack_microbatches(
            sizes.tokens, ranks=backbone_ranks, token_budget=token_budget, cost=cost, sync_every=sync_every
        )
    some_only_encode = 0 < len({encoder for encoder, _ in colocated_lanes}) < encoder_ranks
    media_costs, alike = _media_costs(sizes, cost, encoder_cost, some_only_encode), sizes.alike
    if encoder_cost is None or local or colocated_lanes or encoders:
        # A rank with both lanes never waits for itself, so little is to be gained by a search; and a search would
        # have to compare what media cost one encoder with what others cost another.
        weights = _shares_of_encoders(sizes, media_costs) if encoders else sizes.media_patches.astype(np.float64)
        order = media_order(_media_per_position(microbatches, sizes, costs_once(alike, weights)))
        microbatches = tuple(tuple(of_rank[position] for position in order) for of_rank in microbatches)
    else:
        once = costs_once(alike, media_costs)
        microbatches = _ordered(microbatches, sizes, encoder_ranks, token_budget, cost, once, sync_every)
    rank, position = StepPlan(samples, sizes, microbatches, ()).readers
    shared = encoded_as(alike, rank, position, local=local)
    media = np.arange(len(rank)) if shared is None else np.flatnonzero(shared == np.arange(len(rank)))
    if local:
        batches = local_encoder_batches(rank, position, media, ranks=backbone_ranks, positions=len(microbatches[0]))
    elif encoders:
        batches = pack_batches_of_encoders(
            media_costs,
            rank,
            position,
            media,
            sizes=sizes,
            encoders=encoders,
            encoder_nodes=encoder_nodes,
            backbone_nodes=backbone_nodes,
        )
    else:
        batches = pack_encoder_batches(
            media_costs,
            rank,
            position,
            media,
            encoder_ranks=encoder_ranks,
            colocated_lanes=colocated_lanes,
            busy=_beside_encoding(microbatches, sizes, cost, sync_every, encoder_ranks, colocated_lanes)
            if some_only_encode
            else None,
            in_fixed_order=in_fixed_order,
            encoder_nodes=encoder_nodes,
            backbone_nodes=backbone_nodes,
        )
    if not local:
        batches = side_by_side(batches, StepPlan(samples, sizes, microbatches, (), shared))
        batches = within_budget(batches, sizes.media_patches, encoder_budget)
    microbatches = _by_source(microbatches, batches, sizes, shared)
    if local:  # features come in the order of the samples there, however many batches they are of
        by_modality = batches if sizes.media_modality is None else divided_by_modality(batches, sizes)
        batches = within_budget(by_modality, sizes.media_patches, encoder_budget)
    return StepPlan(samples, sizes, microbatches, batches, shared)


def _media_costs(
    sizes: SampleSizes, cost: CostModel, encoder_cost: CostModel | None, some_only_encode: bool
) -> FloatArray:
    """``[media items]`` what each costs the encoder; in the unit of ``cost`` where both costs meet on a rank."""
    if encoder_cost is not None:
        return encoder_cost.of_each(sizes.media_patches)
    return cost.of_each(sizes.media_rows) if some_only_encode else sizes.media_patches.astype(np.float64)


def _ordered(
    microbatches: Microbatches,
    sizes: SampleSizes,
    encoder_ranks: int,
    token_budget: int,
    cost: CostModel,
    media_costs: FloatArray,
    sync_every: SyncEvery,
) -> Microbatches:
    """The microbatches in the order that makes the step shortest, after swaps that make it shorter still."""
    ranks, positions = len(microbatches), len(microbatches[0])
    bin_of = np.empty(len(sizes), dtype=np.int64)
    for rank, of_rank in enumerate(microbatches):
        for position, members in enumerate(of_rank):
            bin_of[members] = position * ranks + rank
    encoder = np.zeros(len(sizes))
    np.add.at(encoder, sizes.media_sample, media_costs)
    ordered = order_step(
        bin_of,
        sizes.tokens,
        cost.weight_of_each(sizes.tokens),
        encoder,
        positions=positions,
        ranks=ranks,
        encoder_ranks=encoder_ranks,
        budget=token_budget,
        sync_every=sync_every,
    )
    return as_microbatches(ordered, positions, ranks)


def _beside_encoding(
    microbatches: Microbatches,
    sizes: SampleSizes,
    cost: CostModel,
    sync_every: SyncEvery,
    encoder_ranks: int,
    colocated_lanes: Sequence[tuple[int, int]],
) -> FloatArray:
    """``[encoder ranks]`` what the backbone lanes on their processes cost; those of a backbone rank share its cost."""
    at_each = np.array([[cost.of_set(sizes.tokens[m]) if len(m) else 0.0 for m in rank] for rank in microbatches])
    if sync_every == "microbatch":
        at_each[:] = at_each.max(axis=0)
    encoder, backbone = np.array(colocated_lanes).T
    processes = np.bincount(backbone, minlength=len(at_each))
    busy = np.zeros(encoder_ranks)
    np.add.at(busy, encoder, at_each.sum(axis=1)[backbone] / processes[backbone])
    return busy


def _media_per_position(
    microbatches: Microbatches, sizes: SampleSizes, weights: IntArray | FloatArray
) -> IntArray | FloatArray:
    """``[positions]`` weight of the media items that all ranks together read at each position."""
    media = np.zeros(len(sizes), dtype=weights.dtype)
    np.add.at(media, sizes.media_sample, weights)
    at_each = zip(*microbatches, strict=True)
    return np.array([sum(media[members].sum() for members in of_ranks) for of_ranks in at_each])


def _shares_of_encoders(sizes: SampleSizes, media_costs: FloatArray) -> FloatArray:
    """``[media items]`` the share of each in what its encoder has to do in the step."""
    shares = np.zeros(len(media_costs))
    for modality in sizes.modalities:
        media = sizes.of_modality(modality)
        shares[media] = media_costs[media] / max(media_costs[media].sum(), 1.0)
    return shares


def _by_source(
    microbatches: Microbatches, batches: EncoderBatches, sizes: SampleSizes, shared: IntArray | None
) -> Microbatches:
    """The same microbatches, with sequences side by side whose features come from one encoder batch.

    What one batch hands to a microbatch is then copied in one piece. Sequences without media come first.
    """
    batch_of = np.zeros(len(sizes.media_rows), dtype=np.int64)
    for number, media in enumerate(batch for of_ranks in zip_longest(*batches) for batch in of_ranks):
        if media is not None:
            batch_of[media] = number
    batch_of = batch_of if shared is None else batch_of[shared]
    source = np.full(len(sizes), -1)
    has_media = np.diff(sizes.media_start) > 0
    source[has_media] = batch_of[sizes.media_start[:-1][has_media]]
    return tuple(
        tuple(members[np.argsort(source[members], kind="stable")] for members in of_rank) for of_rank in microbatches
    )


def _refuse_bad_ranks(
    backbone_ranks: int,
    encoder_ranks: int,
    token_budget: int,
    encoder_budget: int,
    local: bool,
    colocated_lanes: Sequence[tuple[int, int]],
) -> None:
    least_one = {
        "backbone_ranks": backbone_ranks,
        "encoder_ranks": encoder_ranks,
        "token_budget": token_budget,
        "encoder_budget": encoder_budget,
    }
    for name, value in least_one.items():
        if value < 1:
            raise PackingError(f"{name} is {value}; it must be at least 1.")
    if local and backbone_ranks != encoder_ranks:
        raise PackingError(
            f"local=True lets every rank encode what it reads, but there are {backbone_ranks} backbone ranks and "
            f"{encoder_ranks} encoder ranks; make the numbers equal."
        )
    if not all(0 <= encoder < encoder_ranks and 0 <= reader < backbone_ranks for encoder, reader in colocated_lanes):
        raise PackingError(
            f"colocated_lanes is {tuple(colocated_lanes)}; it must name pairs of an encoder rank below {encoder_ranks} "
            f"and a backbone rank below {backbone_ranks}."
        )


def _refuse_other_modalities(sizes: SampleSizes, encoded: Sequence[str]) -> None:
    """Raise a PackingError for media that no encoder takes.

    Args:
        sizes: of the step's samples.
        encoded: the modality that each encoder takes; empty where one encoder takes all.
    """
    given = sizes.modalities if len(sizes.media_rows) else ()
    if not encoded and len(given) > 1:
        raise PackingError(
            f"The samples have media of the modalities {', '.join(given)}, but one encoder gets media of one at a "
            f"time. Name an encoder for each in the module's halves: {', '.join(f'encoder_{name}' for name in given)}."
        )
    unknown = [name for name in given if encoded and name not in encoded]
    if unknown:
        raise PackingError(
            f"The samples have media of the modality {unknown[0]!r}, but the encoders take {', '.join(encoded)}. Name "
            f"an encoder of it in the module's halves, 'encoder_{unknown[0]}', or leave such media out."
        )


def _refuse_bad_samples(sizes: SampleSizes, samples: IntArray, token_budget: int) -> None:
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
            f"from its media), more than the token budget of {token_budget}; "
            "raise the budget, or drop or shorten the sample."
        )
