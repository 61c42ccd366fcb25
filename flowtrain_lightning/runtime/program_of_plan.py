"""Works a rank's program out of the plan of a step, while the step before runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flowtrain_lightning.data import Entry, RankShard, StepPlan
from flowtrain_lightning.packing.policies.member_orders import MemberOrder, joint_order, member_orders
from flowtrain_lightning.packing.step_graph import BatchOf, Pass, Work
from flowtrain_lightning.runtime.program import PADDING, MadeEntry, RankBatch, RankRole, ReadEntry, StepProgram


def make_program(plan: StepPlan, shard: RankShard, kept_batches: int) -> StepProgram:
    """The work of one rank.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        kept_batches: encoder batches per rank whose activations may be kept at a time.
    """
    of_batch: list[dict[int, list[int]]] = [{} for _ in plan.encoder_batches]
    of_microbatch: dict[int, list[int]] = {}
    for number, entry in enumerate(plan.entries):
        of_batch[entry.encoder_rank].setdefault(entry.encoder_batch, []).append(number)
        if entry.backbone_rank == shard.backbone_rank:
            of_microbatch.setdefault(entry.microbatch, []).append(number)
    roles = []
    if shard.backbone_rank is not None:
        roles.append(_reading_role(plan, shard, of_microbatch))
    in_turns = None
    if len(shard.encoder_members) + len(roles) > 1 and shard.in_fixed_order:
        in_turns, encoding = _encoding_in_turns(plan, shard, of_batch, kept_batches)
    else:
        encoding = _encoding_roles(plan, shard, of_batch, kept_batches)
    roles += encoding
    rows = tuple(tuple(_rows_of(plan, numbers) for numbers in of_rank.values()) for of_rank in of_batch)
    # A role that waits for bytes would keep the other from its turn, or other tensor ranks from their encoder batch.
    some_in_turns = bool(shard.colocated_lanes) and shard.in_fixed_order
    holds_all = some_in_turns or any(shard.meeting(role).ranks > 1 for role in shard.graph.producers)
    return StepProgram(
        {role.role: role for role in roles},
        rows,
        tuple(sorted({entry.modality for entry in plan.entries})),
        len(plan.microbatches[0]),
        shard.producers_per_rank,
        in_turns=in_turns,
        holds_all=holds_all,
        read_rows=_read_rows(plan) if holds_all else (),
    )


def _reading_role(plan: StepPlan, shard: RankShard, entries: Mapping[int, Sequence[int]]) -> RankRole:
    """A rank's part in the trunk: each microbatch backward at once, as nobody waits for what it makes.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        entries: number of each of its microbatches -> its entries.
    """
    assert shard.backbone_rank is not None
    members = plan.microbatches[shard.backbone_rank]
    pads = bool(shard.meeting(shard.trunk).passes)
    numbers = [number for number, samples in enumerate(members) if len(samples) or pads]
    batches = {number: _microbatch(plan, number, entries.get(number, [])) for number in numbers}
    passes: list[Pass] = [(kind, number) for number in numbers for kind in ("forward", "backward")]  # type: ignore[misc]
    return RankRole(shard.trunk, shard.backbone_rank, batches, tuple(passes), tuple(range(len(members))), reads=True)


def _encoding_roles(
    plan: StepPlan, shard: RankShard, of_batch: Sequence[Mapping[int, Sequence[int]]], kept_batches: int
) -> list[RankRole]:
    """A rank's part in each role that encodes, by itself.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        of_batch: number of each encoder batch -> its entries, of every member.
        kept_batches: encoder batches whose activations may be kept at a time.
    """
    found = []
    for member in shard.encoder_members:
        role = shard.role_of(member)
        (order,) = member_orders(
            plan,
            [member],
            kept_batches,
            meet=bool(shard.meeting(role).passes),
            of_role=shard.members_of(role),
            colocated=[member] if shard.backbone_rank is not None else [],
            in_fixed_order=shard.in_fixed_order,
        )
        batches = _made_batches(plan, shard, member, of_batch[member], order)
        found.append(RankRole(role, member, batches, order.passes, tuple(position for position, _ in order.turns)))
    return found


def _encoding_in_turns(
    plan: StepPlan, shard: RankShard, of_batch: Sequence[Mapping[int, Sequence[int]]], kept_batches: int
) -> tuple[tuple[Work, ...], list[RankRole]]:
    """A rank's part in the roles that encode, where one order holds for all of them; and that order.

    Args:
        plan: see `_encoding_roles`.
        shard: see there.
        of_batch: see there.
        kept_batches: see there.
    """
    members = {shard.role_of(member): member for member in shard.encoder_members}
    if len(members) == 1:
        roles = _encoding_roles(plan, shard, of_batch, kept_batches)
        return tuple(work for role in roles for work in role.works(trains=True)), roles
    turns = {role: plan.turns_of(shard.members_of(role)) for role in members}
    joint, roles = joint_order(turns, kept_batches), []
    for role, member in members.items():
        own = turns[role] if shard.meeting(role).passes else plan.encoder_turns[member]
        passes = tuple(each for name, each in joint.passes if name == role and turns[role][each[1]] in own)
        of_role = MemberOrder(turns[role], passes, joint.recomputed[role])
        batches = _made_batches(plan, shard, member, of_batch[member], of_role)
        roles.append(RankRole(role, member, batches, passes, tuple(position for position, _ in turns[role])))
    has = {role.role: role.batches for role in roles}
    order = [(role, each) for role, each in joint.passes if each[1] in has[role]]
    return tuple(Work(BatchOf(role, members[role], place), kind) for role, (kind, place) in order), roles


def _made_batches(
    plan: StepPlan, shard: RankShard, member: int, own: Mapping[int, Sequence[int]], order: MemberOrder
) -> dict[int, RankBatch]:
    """A member's batches by place, and those that it encodes for nothing."""
    loaded = sum(len(plan.encoder_batches[other]) for other in shard.encoder_members if other < member)
    number_of = {turn: number for number, turn in enumerate(plan.encoder_turns[member])}
    batches: dict[int, RankBatch] = {}
    for place in dict.fromkeys(place for _, place in order.passes):
        number = number_of.get(order.turns[place], PADDING)
        entries = ((entry, plan.entries[entry]) for entry in own.get(number, ()))
        made = tuple(MadeEntry(entry, found.modality, found.rows, found.backbone_rank) for entry, found in entries)
        batches[place] = RankBatch(number, loaded + number, made, recomputes=place in order.recomputed)
    return batches


def _rows_of(plan: StepPlan, numbers: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The modality of an encoder batch of these entries, and their rows."""
    return plan.entries[numbers[0]].modality, tuple(plan.entries[number].rows for number in numbers)


def _read_rows(plan: StepPlan) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
    """For each member of the trunk, the modality and rows of every entry that it reads."""
    read: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in plan.microbatches]
    for entry in plan.entries:
        read[entry.backbone_rank].append((entry.modality, (entry.rows,)))
    return tuple(map(tuple, read))


def _microbatch(plan: StepPlan, number: int, numbers: Sequence[int]) -> RankBatch:
    entries = {entry: plan.entries[entry] for entry in numbers}
    rows: dict[str, int] = {}
    slices: dict[int, tuple[slice, ...]] = {}
    for modality in sorted({entry.modality for entry in entries.values()}):  # as one process has them, by name
        own = {entry: found for entry, found in entries.items() if found.modality == modality}
        rows[modality], found_slices = feature_slices(plan, list(own.values()))
        slices |= zip(own, found_slices, strict=True)
    read = (ReadEntry(entry, found.modality, found.encoder_rank, slices[entry]) for entry, found in entries.items())
    return RankBatch(number, number, read=tuple(read), rows_read=rows)


def feature_slices(plan: StepPlan, entries: Sequence[Entry]) -> tuple[int, list[tuple[slice, ...]]]:
    """Finds the places of one microbatch's entries among its features.

    Args:
        plan: the step's plan.
        entries: all entries of one microbatch that are of one modality.

    Returns:
        rows of features of the modality, whose media items come in order of appearance; and for each entry the runs of
        adjacent rows that its own rows become, one after another.
    """
    members = plan.microbatches[entries[0].backbone_rank][entries[0].microbatch]
    sizes = plan.sizes
    media = np.concatenate([np.arange(sizes.media_start[s], sizes.media_start[s + 1]) for s in members])
    if sizes.media_modality is not None:
        media = media[sizes.media_modality[media] == entries[0].modality]
    ends = np.cumsum(sizes.media_rows[media])
    start = dict(zip(media.tolist(), (ends - sizes.media_rows[media]).tolist(), strict=True))
    return int(ends[-1]), [
        _joined([(start[m], int(sizes.media_rows[m])) for m in entry.media.tolist()]) for entry in entries
    ]


def _joined(runs: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    """Starts and lengths as slices; adjacent ones become one."""
    joined: list[slice] = []
    for start, length in runs:
        if joined and joined[-1].stop == start:
            start, length = joined[-1].start, length + start - joined.pop().start
        joined.append(slice(start, start + length))
    return tuple(joined)
