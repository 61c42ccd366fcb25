"""Works a rank's program out of the plan of a step, while the step before runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flowtrain_lightning.data import Entry, RankShard, StepPlan
from flowtrain_lightning.packing import IntArray
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
        for rank, microbatch in entry.readers:
            if rank == shard.backbone_rank:
                of_microbatch.setdefault(microbatch, []).append(number)
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
    # So would one that waits for other ranks inside of a pass, where others wait for what several microbatches read.
    some_in_turns = shard.in_fixed_order and (bool(shard.colocated_lanes) or plan.encoded_as is not None)
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
    rank = shard.backbone_rank
    batches = {number: _microbatch(plan, rank, number, entries.get(number, [])) for number in numbers}
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
            readers_meet=shard.meeting(shard.trunk).together,
        )
        batches = _made_batches(plan, shard, member, of_batch[member], order)
        due = tuple(position for position, _ in order.turns)
        found.append(RankRole(role, member, batches, order.passes, due, order.until))
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
    until = {role: plan.turns_until(turns[role], shard.members_of(role)) for role in members}
    joint, roles = joint_order(turns, kept_batches, until), []
    for role, member in members.items():
        own = turns[role] if shard.meeting(role).passes else plan.encoder_turns[member]
        passes = tuple(each for name, each in joint.passes if name == role and turns[role][each[1]] in own)
        of_role = MemberOrder(turns[role], passes, joint.recomputed[role])
        batches = _made_batches(plan, shard, member, of_batch[member], of_role)
        due = tuple(position for position, _ in turns[role])
        roles.append(RankRole(role, member, batches, passes, due, until[role]))
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
        made = tuple(MadeEntry(entry, found.modality, found.rows, found.members) for entry, found in entries)
        batches[place] = RankBatch(number, loaded + number, made, recomputes=place in order.recomputed)
    return batches


def _rows_of(plan: StepPlan, numbers: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The modality of an encoder batch of these entries, and their rows."""
    return plan.entries[numbers[0]].modality, tuple(plan.entries[number].rows for number in numbers)


def _read_rows(plan: StepPlan) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
    """For each member of the trunk, the modality and rows of every entry that it reads."""
    read: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in plan.microbatches]
    for entry in plan.entries:
        for rank in entry.members:
            read[rank].append((entry.modality, (entry.rows,)))
    return tuple(map(tuple, read))


def _microbatch(plan: StepPlan, rank: int, number: int, numbers: Sequence[int]) -> RankBatch:
    rows: dict[str, int] = {}
    read: dict[int, ReadEntry] = {}
    for modality in sorted({plan.entries[entry].modality for entry in numbers}):  # as one process has them, by name
        rows[modality], places = _places(plan, plan.microbatches[rank][number], modality)
        for entry in numbers:
            if (found := plan.entries[entry]).modality == modality:
                read[entry] = _read_entry(plan, entry, found, rank, number, places)
    return RankBatch(number, number, read=tuple(read[entry] for entry in numbers), rows_read=rows)


def _read_entry(
    plan: StepPlan, entry: int, found: Entry, rank: int, number: int, places: Mapping[int, Sequence[int]]
) -> ReadEntry:
    """An entry as a microbatch reads it, given the places where the rows of each media item begin."""
    media, lengths = found.media.tolist(), plan.sizes.media_rows[found.media].tolist()
    own = [microbatch for reader, microbatch in found.readers if reader == rank]
    again, first = [], 0
    for item, length in zip(media, lengths, strict=True):
        again += [(slice(first, first + length), slice(start, start + length)) for start in places[item][1:]]
        first += length
    return ReadEntry(
        entry,
        found.modality,
        found.encoder_rank,
        _joined([(places[item][0], length) for item, length in zip(media, lengths, strict=True)]),
        tuple(again),
        part=found.members.index(rank),
        answers=number == own[-1],
        early=number > found.microbatch,
    )


def _places(plan: StepPlan, members: IntArray, modality: str) -> tuple[int, dict[int, list[int]]]:
    """Finds the places of the features of a microbatch's media items of one modality.

    Args:
        plan: the step's plan.
        members: the samples of the microbatch.
        modality: of the media items.

    Returns:
        rows of features in all; and for each media item that is encoded the first row of it, wherever it appears.
    """
    sizes = plan.sizes
    media = np.concatenate([np.arange(sizes.media_start[s], sizes.media_start[s + 1]) for s in members])
    if sizes.media_modality is not None:
        media = media[sizes.media_modality[media] == modality]
    ends = np.cumsum(sizes.media_rows[media])
    encoded = media if plan.encoded_as is None else plan.encoded_as[media]
    places: dict[int, list[int]] = {}
    for item, start in zip(encoded.tolist(), (ends - sizes.media_rows[media]).tolist(), strict=True):
        places.setdefault(item, []).append(start)
    return int(ends[-1]), places


def _joined(runs: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    """Starts and lengths as slices; adjacent ones become one."""
    joined: list[slice] = []
    for start, length in runs:
        if joined and joined[-1].stop == start:
            start, length = joined[-1].start, length + start - joined.pop().start
        joined.append(slice(start, start + length))
    return tuple(joined)
