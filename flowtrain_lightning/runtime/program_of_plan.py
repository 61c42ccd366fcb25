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
    members, trunk = shard.members, shard.members.trunk
    made: dict[BatchOf, list[int]] = {}
    read: dict[BatchOf, list[int]] = {}
    for number, entry in enumerate(plan.entries):
        made.setdefault(entry.maker, []).append(number)
        for reader in entry.readers:
            read.setdefault(reader, []).append(number)
    roles = [_reading_role(plan, shard, read)] if trunk in shard.own else []
    in_turns = None
    if len(shard.own) > 1 and members.in_fixed_order:
        in_turns, encoding = _encoding_in_turns(plan, shard, made, kept_batches)
    else:
        encoding = _encoding_roles(plan, shard, made, kept_batches)
    roles += encoding
    # A role that waits for bytes would keep the other from its turn, or other tensor ranks from their encoder batch.
    # So would one that waits for other ranks inside of a pass, where others wait for what several microbatches read.
    some_in_turns = members.in_fixed_order and (bool(members.colocated) or plan.encoded_as is not None)
    holds_all = some_in_turns or any(members.meeting(role).ranks > 1 for role in members.producers)
    return StepProgram(
        {role.role: role for role in roles},
        _made_rows(plan, made),
        tuple(sorted({entry.modality for entry in plan.entries})),
        len(plan.microbatches[0]),
        members.producers_per_rank,
        in_turns=in_turns,
        holds_all=holds_all,
        read_rows=_read_rows(plan) if holds_all else (),
    )


def _reading_role(plan: StepPlan, shard: RankShard, entries: Mapping[BatchOf, Sequence[int]]) -> RankRole:
    """A rank's part in the trunk: each microbatch backward at once, as nobody waits for what it makes.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        entries: batch -> the entries that it reads.
    """
    role, member = shard.members.trunk, shard.own[shard.members.trunk]
    microbatches = plan.batches[role][member]
    pads = bool(shard.members.meeting(role).passes)
    numbers = [number for number, samples in enumerate(microbatches) if len(samples) or pads]
    batches = {
        number: _reading_batch(plan, BatchOf(role, member, number), entries.get(BatchOf(role, member, number), ()))
        for number in numbers
    }
    passes: list[Pass] = [(kind, number) for number in numbers for kind in ("forward", "backward")]  # type: ignore[misc]
    return RankRole(role, member, batches, tuple(passes), tuple(range(len(microbatches))), reads=True)


def _encoding_roles(
    plan: StepPlan, shard: RankShard, entries: Mapping[BatchOf, Sequence[int]], kept_batches: int
) -> list[RankRole]:
    """A rank's part in each role that encodes, by itself.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        entries: batch -> the entries that it makes.
        kept_batches: encoder batches whose activations may be kept at a time.
    """
    found = []
    for role in shard.encodes:
        member = shard.own[role]
        (order,) = member_orders(plan, shard.members, role, kept_batches, [member])
        batches = _making_batches(plan, role, member, entries, order)
        due = tuple(position for position, _ in order.turns)
        found.append(RankRole(role, member, batches, order.passes, due, order.until, makes=True))
    return found


def _encoding_in_turns(
    plan: StepPlan, shard: RankShard, entries: Mapping[BatchOf, Sequence[int]], kept_batches: int
) -> tuple[tuple[Work, ...], list[RankRole]]:
    """A rank's part in the roles that encode, where one order holds for all of them; and that order.

    Args:
        plan: see `_encoding_roles`.
        shard: see there.
        entries: see there.
        kept_batches: see there.
    """
    if len(shard.encodes) == 1:
        roles = _encoding_roles(plan, shard, entries, kept_batches)
        return tuple(work for role in roles for work in role.works(trains=True)), roles
    turns = {role: plan.turns_of(role) for role in shard.encodes}
    until = {role: plan.turns_until(role, turns[role]) for role in shard.encodes}
    joint, roles = joint_order(turns, kept_batches, until), []
    for role in shard.encodes:
        member = shard.own[role]
        own = turns[role] if shard.members.meeting(role).passes else plan.turns[role][member]
        passes = tuple(each for name, each in joint.passes if name == role and turns[role][each[1]] in own)
        order = MemberOrder(turns[role], passes, joint.recomputed[role])
        batches = _making_batches(plan, role, member, entries, order)
        due = tuple(position for position, _ in turns[role])
        roles.append(RankRole(role, member, batches, passes, due, until[role], makes=True))
    has = {role.role: role.batches for role in roles}
    order_of_all = [(role, each) for role, each in joint.passes if each[1] in has[role]]
    return tuple(Work(BatchOf(role, shard.own[role], place), kind) for role, (kind, place) in order_of_all), roles


def _making_batches(
    plan: StepPlan, role: str, member: int, entries: Mapping[BatchOf, Sequence[int]], order: MemberOrder
) -> dict[int, RankBatch]:
    """A member's batches by place, and those that it encodes for nothing."""
    number_of = {turn: number for number, turn in enumerate(plan.turns[role][member])}
    batches: dict[int, RankBatch] = {}
    for place in dict.fromkeys(place for _, place in order.passes):
        number = number_of.get(order.turns[place], PADDING)
        own = [(entry, plan.entries[entry]) for entry in entries.get(BatchOf(role, member, number), ())]
        made = tuple(MadeEntry(entry, found.modality, found.rows, found.members) for entry, found in own)
        batches[place] = RankBatch(number, made, recomputes=place in order.recomputed)
    return batches


def _made_rows(
    plan: StepPlan, made: Mapping[BatchOf, Sequence[int]]
) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
    """For each member that encodes, of each of its batches the modality, and the rows of its entries."""
    found: dict[tuple[str, int], list[tuple[str, tuple[int, ...]]]] = {maker: [] for maker in plan.makers}
    for batch, numbers in made.items():
        rows = tuple(plan.entries[number].rows for number in numbers)
        found[batch.role, batch.member].append((plan.entries[numbers[0]].modality, rows))
    return tuple(map(tuple, found.values()))


def _read_rows(plan: StepPlan) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
    """For each member of the trunk, the modality and rows of every entry that it reads."""
    read: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in plan.microbatches]
    for entry in plan.entries:
        for _, member in entry.members:
            read[member].append((entry.modality, (entry.rows,)))
    return tuple(map(tuple, read))


def _reading_batch(plan: StepPlan, batch: BatchOf, numbers: Sequence[int]) -> RankBatch:
    rows: dict[str, int] = {}
    read: dict[int, ReadEntry] = {}
    samples = plan.batches[batch.role][batch.member][batch.number]
    for modality in sorted({plan.entries[entry].modality for entry in numbers}):  # as one process has them, by name
        rows[modality], places = _places(plan, samples, modality)
        for entry in numbers:
            if (found := plan.entries[entry]).modality == modality:
                read[entry] = _read_entry(plan, entry, found, batch, places)
    return RankBatch(batch.number, read=tuple(read[entry] for entry in numbers), rows_read=rows)


def _read_entry(
    plan: StepPlan, entry: int, found: Entry, batch: BatchOf, places: Mapping[int, Sequence[int]]
) -> ReadEntry:
    """An entry as a batch reads it, given the places where the rows of each media item begin."""
    media, lengths = found.media.tolist(), plan.sizes.media_rows[found.media].tolist()
    member = batch.role, batch.member
    own = [reader.number for reader in found.readers if (reader.role, reader.member) == member]
    again, first = [], 0
    for item, length in zip(media, lengths, strict=True):
        again += [(slice(first, first + length), slice(start, start + length)) for start in places[item][1:]]
        first += length
    return ReadEntry(
        entry,
        found.modality,
        (found.maker.role, found.maker.member),
        _joined([(places[item][0], length) for item, length in zip(media, lengths, strict=True)]),
        tuple(again),
        part=found.members.index(member),
        answers=batch.number == own[-1],
        early=batch.number > found.readers[0].number,
    )


def _places(plan: StepPlan, samples: IntArray, modality: str) -> tuple[int, dict[int, list[int]]]:
    """Finds the places of the features of a microbatch's media items of one modality.

    Args:
        plan: the step's plan.
        samples: of the microbatch.
        modality: of the media items.

    Returns:
        rows of features in all; and for each media item that is encoded the first row of it, wherever it appears.
    """
    sizes = plan.sizes
    media = np.concatenate([np.arange(sizes.media_start[s], sizes.media_start[s + 1]) for s in samples])
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
