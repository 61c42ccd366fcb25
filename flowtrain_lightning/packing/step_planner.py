"""The plan of one step: sizes of samples in, who encodes and who reads what out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from flowtrain_lightning.packing.batches_behind import batches_behind, generated_items
from flowtrain_lightning.packing.cost_model import DEFAULT_COST, CostModel
from flowtrain_lightning.packing.encoder_batches import (
    ENCODER_BUDGET,
    divided_by_modality,
    local_encoder_batches,
    pack_encoder_batches,
    within_budget,
)
from flowtrain_lightning.packing.microbatches import as_microbatches, pack_microbatches
from flowtrain_lightning.packing.order import media_order, order_step
from flowtrain_lightning.packing.role_graph import GENERATED, GENERATOR
from flowtrain_lightning.packing.shared_media import costs_once, divided_by_readers, encoded_as, side_by_side
from flowtrain_lightning.packing.stage_microbatches import cheap_ends, pack_for_stages
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_plan import (
    Batches,
    FloatArray,
    IntArray,
    PackingError,
    SampleSizes,
    StepPlan,
    SyncEvery,
)


def plan_step(
    sizes: SampleSizes,
    samples: IntArray,
    members: StepMembers,
    *,
    token_budget: int,
    encoder_budget: int = ENCODER_BUDGET,
    cost: CostModel = DEFAULT_COST,
    media_costs: Mapping[str, CostModel] | None = None,
    sync_every: SyncEvery = "microbatch",
    microbatches: Batches | None = None,
) -> StepPlan:
    """Plan one step. The same arguments give the same plan on every rank and machine.

    Args:
        sizes: sizes of ``samples``, in that order.
        samples: ``[n]`` indices into the data set, in sampler order.
        members: of all roles. Where they are ``local``, one encoder batch (perhaps empty) is made per microbatch and
            modality of the step, where the budget allows that. Where some share a process with the trunk, what it reads
            is encoded there unless balance moves it; members that only encode then have precedence, as far as all end
            the step together.
        token_budget: the most tokens of one microbatch.
        encoder_budget: the most patches of one encoder batch, save one of a single media item that has more.
        cost: what a packed set of sequences costs the trunk.
        media_costs: role -> what a set of its media items costs, by patches and in the unit of ``cost``. Where it has
            the role that encodes, media items are dealt by cost, positions come in the order that makes the step
            shortest, and samples of equal length are swapped between positions where that makes it shorter still. A
            role that it lacks has media items dealt by patches, and positions are ordered by how much media they read;
            where some ranks only encode and others do both, a media item to encode then is taken to cost as much as
            its rows cost the trunk.
        sync_every: how often members of the trunk wait for each other.
        microbatches: the microbatches, if they are made already: they are put in order, and media items dealt. None
            packs as many as are needed, and where the trunk has stages as many as keep these busy.

    Raises:
        PackingError: a role without a member or a budget below 1, sizes of other samples, a sample over the token
            budget, colocated members that do not exist, local ones of unequal numbers, or media that nobody encodes.
    """
    _refuse_bad_members(members, token_budget, encoder_budget)
    _refuse_bad_samples(sizes, samples, token_budget)
    if not members.local:
        _refuse_other_modalities(sizes, members)
    trunk, graph, models = members.trunk, members.graph, media_costs or {}
    if microbatches is None:
        microbatches = _packed(sizes, members, token_budget, cost, sync_every)
    of_all = _cost_of_each(sizes, members, cost, models)
    of_encoded = of_all.copy()
    of_encoded[generated_items(sizes, graph)] = 0.0
    if members.local or any(role not in models for role in members.producers) or not _can_be_searched(members):
        microbatches = _by_media(microbatches, sizes, None if graph.is_simple else of_encoded)
        if members.pipeline.stages > 1:
            microbatches = cheap_ends(microbatches, sizes.tokens, cost)
    else:
        encoding = sum(members.counts[role] for role in members.producers)
        once = costs_once(sizes.alike, of_encoded)
        microbatches = _ordered(microbatches, sizes, encoding, token_budget, cost, once, sync_every)
    reader, position = StepPlan(samples, sizes, {trunk: microbatches}, graph).readers
    most_kept = float(encoder_budget * (1 if members.local else sum(members.counts[role] for role in graph.producers)))
    shared = encoded_as(sizes.alike, reader, position, sizes.media_patches, local=members.local, most_kept=most_kept)
    read = StepPlan(samples, sizes, {trunk: microbatches}, graph, shared)
    batches = _local(read, members) if members.local else _dealt(of_encoded, read, members, cost, sync_every)
    batches |= batches_behind(of_all, read, members)
    if members.local:  # features come in the order of the samples there, however many batches they are of
        microbatches = _by_source(microbatches, batches, sizes, shared)
        batches = {role: divided_by_modality(own, sizes) for role, own in batches.items()}
    batches = _cut(batches, read, encoder_budget)
    if not members.local:
        microbatches = _by_source(microbatches, batches, sizes, shared)
    plan = StepPlan(samples, sizes, {trunk: microbatches, **batches}, graph, shared)
    return replace(plan, costs=_batch_costs(plan, cost, models)) if members.searched else plan


def sync_every_of(members: StepMembers) -> SyncEvery:
    """How often members of the trunk wait for each other, as their layout has it."""
    return "microbatch" if members.meeting(members.trunk).passes else "step"


def _packed(
    sizes: SampleSizes, members: StepMembers, token_budget: int, cost: CostModel, sync_every: SyncEvery
) -> Batches:
    """As few microbatches as hold the samples; where the trunk has stages, as many as keep these busy."""
    ranks, stages = members.counts[members.trunk], members.pipeline.stages
    given: dict[str, Any] = {"token_budget": token_budget, "cost": cost, "sync_every": sync_every}
    if stages > 1:
        return pack_for_stages(sizes.tokens, ranks=ranks, stages=stages, **given)
    return pack_microbatches(sizes.tokens, ranks=ranks, **given)


def _can_be_searched(members: StepMembers) -> bool:
    """Whether the shortest order of positions can be searched, and is worth it.

    A rank with both roles never waits for itself, so little is to be gained; and a search would have to compare what
    media cost one encoder with what others cost another, and knows no stages.
    """
    return not members.colocated and members.graph.is_simple and members.pipeline.stages == 1


def _cut(batches: Mapping[str, Batches], plan: StepPlan, encoder_budget: int) -> dict[str, Batches]:
    """The same batches within the encoder's budget; what several microbatches read is in batches of its own."""
    apart = {role: divided_by_readers(own, plan) for role, own in batches.items() if role in plan.graph.producers}
    patches = plan.sizes.media_patches
    return {role: within_budget(apart.get(role, own), patches, encoder_budget) for role, own in batches.items()}


def _batch_costs(
    plan: StepPlan, reading: CostModel, media_costs: Mapping[str, CostModel]
) -> dict[str, list[list[float]]]:
    """Role -> ``[member][number]`` what each batch costs; media what their rows cost the trunk, where nobody knows."""
    models = dict.fromkeys(plan.batches, reading) | dict(media_costs)
    patches, rows = plan.sizes.media_patches, plan.sizes.media_rows
    lengths = {role: patches if role in media_costs else rows for role in plan.batches}
    lengths[plan.graph.trunk] = plan.sizes.tokens
    return {
        role: [[models[role].of_set(lengths[role][batch]) if len(batch) else 0.0 for batch in own] for own in batches]
        for role, batches in plan.batches.items()
    }


def _by_media(microbatches: Batches, sizes: SampleSizes, costs: FloatArray | None) -> Batches:
    """The microbatches in the order of `media_order`.

    Args:
        microbatches: of all members.
        sizes: of the samples.
        costs: ``[media items]`` what encoding each costs, compared within its modality; None counts their patches.
    """
    weights = sizes.media_patches.astype(np.float64) if costs is None else _shares(sizes, costs)
    order = media_order(_media_per_position(microbatches, sizes, costs_once(sizes.alike, weights)))
    return tuple(tuple(own[position] for position in order) for own in microbatches)


def _local(plan: StepPlan, members: StepMembers) -> dict[str, Batches]:
    """The batches of ranks that encode what they read, one for each microbatch."""
    (role,) = members.producers
    ranks, positions = len(plan.microbatches), len(plan.microbatches[0])
    return {role: local_encoder_batches(*plan.readers, plan.encoded, ranks=ranks, positions=positions)}


def _dealt(
    costs: FloatArray, plan: StepPlan, members: StepMembers, cost: CostModel, sync_every: SyncEvery
) -> dict[str, Batches]:
    """Role that encodes -> its batches, not yet cut.

    Args:
        costs: ``[media items]`` what encoding each costs; those of two roles are never compared.
        plan: says who reads them.
        members: of all roles.
        cost: what a packed set of sequences costs the trunk.
        sync_every: how often members of the trunk wait for each other.
    """
    dealt = {}
    for role in members.producers:
        modality, pairs, busy = members.graph.modality_of(role), members.colocated.get(role, ()), None
        own = plan.encoded
        if modality is not None:
            own = np.intersect1d(plan.sizes.of_modality(modality), own, assume_unique=True)
        alone = modality is None  # what one encoder does beside another is not weighed
        if alone and members.some_only_encode:
            busy = _beside_encoding(plan, cost, sync_every, members.counts[role], pairs)
        batches = pack_encoder_batches(
            costs,
            *plan.readers,
            own,
            members=members.counts[role],
            colocated=pairs if alone else (),
            busy=busy,
            in_fixed_order=alone and members.in_fixed_order,
            nodes=members.nodes.get(role, ()),
            reader_nodes=members.nodes.get(members.trunk, ()),
        )
        dealt[role] = side_by_side(batches, plan)
    return dealt


def _cost_of_each(
    sizes: SampleSizes, members: StepMembers, cost: CostModel, media_costs: Mapping[str, CostModel]
) -> FloatArray:
    """``[media items]`` what each costs the role that takes it; in the unit of ``cost`` where costs meet on a rank."""
    patches, graph = sizes.media_patches, members.graph
    costs = cost.of_each(sizes.media_rows) if members.some_only_encode else patches.astype(np.float64)
    for role in (*graph.producers, *graph.behind):
        modality = graph.modality_of(role)
        own = slice(None) if modality is None else sizes.of_modality(modality)
        if role in media_costs:
            costs[own] = media_costs[role].of_each(patches[own])
        elif role in graph.behind:
            costs[own] = patches[own]
    return costs


def _ordered(
    microbatches: Batches,
    sizes: SampleSizes,
    encoding: int,
    token_budget: int,
    cost: CostModel,
    encoding_costs: FloatArray,
    sync_every: SyncEvery,
) -> Batches:
    """The microbatches in the order that makes the step shortest, after swaps that make it shorter still."""
    ranks, positions = len(microbatches), len(microbatches[0])
    bin_of = np.empty(len(sizes), dtype=np.int64)
    for rank, of_rank in enumerate(microbatches):
        for position, members in enumerate(of_rank):
            bin_of[members] = position * ranks + rank
    encoder = np.zeros(len(sizes))
    np.add.at(encoder, sizes.media_sample, encoding_costs)
    ordered = order_step(
        bin_of,
        sizes.tokens,
        cost.weight_of_each(sizes.tokens),
        encoder,
        positions=positions,
        ranks=ranks,
        encoder_ranks=encoding,
        budget=token_budget,
        sync_every=sync_every,
    )
    return as_microbatches(ordered, positions, ranks)


def _beside_encoding(
    plan: StepPlan, cost: CostModel, sync_every: SyncEvery, members: int, colocated: Sequence[tuple[int, int]]
) -> FloatArray:
    """``[members]`` what the trunk costs on the process of each; those that share its microbatches share its cost."""
    tokens = plan.sizes.tokens
    at_each = np.array([[cost.of_set(tokens[m]) if len(m) else 0.0 for m in own] for own in plan.microbatches])
    if sync_every == "microbatch":
        at_each[:] = at_each.max(axis=0)
    member, reader = np.array(colocated).T
    processes = np.bincount(reader, minlength=len(at_each))
    busy = np.zeros(members)
    np.add.at(busy, member, at_each.sum(axis=1)[reader] / processes[reader])
    return busy


def _media_per_position(microbatches: Batches, sizes: SampleSizes, weights: FloatArray) -> FloatArray:
    """``[positions]`` weight of the media items that all members together read at each position."""
    media = np.zeros(len(sizes), dtype=weights.dtype)
    np.add.at(media, sizes.media_sample, weights)
    at_each = zip(*microbatches, strict=True)
    return np.array([sum(media[samples].sum() for samples in of_members) for of_members in at_each])


def _shares(sizes: SampleSizes, media_costs: FloatArray) -> FloatArray:
    """``[media items]`` the share of each in what its encoder has to do in the step."""
    shares = np.zeros(len(media_costs))
    for modality in sizes.modalities:
        media = sizes.of_modality(modality)
        shares[media] = media_costs[media] / max(media_costs[media].sum(), 1.0)
    return shares


def _by_source(
    microbatches: Batches, batches: Mapping[str, Batches], sizes: SampleSizes, shared: IntArray | None
) -> Batches:
    """The same microbatches, with sequences side by side whose features come from one encoder batch.

    What one batch hands to a microbatch is then copied in one piece. Sequences without media come first.
    """
    batch_of = np.zeros(len(sizes.media_rows), dtype=np.int64)
    for number, media in enumerate(chain(*zip_longest(*chain(*batches.values())))):
        if media is not None:
            batch_of[media] = number
    batch_of = batch_of if shared is None else batch_of[shared]
    source = np.full(len(sizes), -1)
    has_media = np.diff(sizes.media_start) > 0
    source[has_media] = batch_of[sizes.media_start[:-1][has_media]]
    return tuple(tuple(samples[np.argsort(source[samples], kind="stable")] for samples in own) for own in microbatches)


def _refuse_bad_members(members: StepMembers, token_budget: int, encoder_budget: int) -> None:
    least_one = {f"The number of {role} members": members.counts[role] for role in members.graph.roles}
    for name, value in (least_one | {"token_budget": token_budget, "encoder_budget": encoder_budget}).items():
        if value < 1:
            raise PackingError(f"{name} is {value}; it must be at least 1.")
    if members.local and len(set(members.counts.values())) > 1:
        raise PackingError(
            f"local=True lets every rank encode what it reads, but the roles have unlike numbers of members: "
            f"{dict(members.counts)}; make them equal."
        )
    readers = members.counts[members.trunk]
    for role, pairs in members.colocated.items():
        if not all(0 <= member < members.counts[role] and 0 <= reader < readers for member, reader in pairs):
            raise PackingError(
                f"colocated[{role!r}] is {tuple(pairs)}; it must name pairs of a member of {role!r} below "
                f"{members.counts[role]} and one of {members.trunk!r} below {readers}."
            )


def _refuse_other_modalities(sizes: SampleSizes, members: StepMembers) -> None:
    """Raise a PackingError for media that no role encodes."""
    every = sizes.modalities if len(sizes.media_rows) else ()
    given = [modality for modality in every if modality not in members.graph.generated]
    if GENERATED in given:
        raise PackingError(
            "The samples have images to be generated, but no role generates. Name one in the module's halves, "
            f"{GENERATOR!r}, or leave such parts out."
        )
    encoded = [modality for role in members.producers if (modality := members.graph.modality_of(role)) is not None]
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
