"""Works a rank's program out of the plan of a step, while the step before runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from flowtrain_lightning.data import RankShard, StepPlan
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.packing.policies.member_orders import MemberOrder, member_orders, roles_in_turns
from flowtrain_lightning.packing.policies.trunk_order import stage_order, trunk_order
from flowtrain_lightning.packing.policies.virtual_stages import ChunkPass
from flowtrain_lightning.packing.searched.order_of_step import searched_step
from flowtrain_lightning.packing.stage_entries import hidden_states, part_names, stage_name
from flowtrain_lightning.packing.step_graph import BatchOf, Pass, Work
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.runtime.program import PADDING, MadeEntry, RankBatch, RankRole, ReadEntry, StepProgram
from flowtrain_lightning.runtime.program_in_order import in_searched_order
from flowtrain_lightning.runtime.program_in_stages import RowsBetween, by_stages, in_stages, rows_between


def make_program(
    plan: StepPlan, shard: RankShard, kept_batches: int, row_bytes: Mapping[str, float] = MappingProxyType({})
) -> StepProgram:
    """The work of one rank.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        kept_batches: encoder batches per rank whose activations may be kept at a time.
        row_bytes: see `searched_step`.
    """
    members, trunk = shard.members, shard.members.trunk
    made: dict[BatchOf, list[int]] = {}
    read: dict[BatchOf, list[int]] = {}
    for number, entry in enumerate(plan.entries):
        made.setdefault(entry.maker, []).append(number)
        for reader in entry.readers:
            read.setdefault(reader, []).append(number)
    roles = [_trunk_role(plan, shard, made, read)] if trunk in shard.own else []
    roles += [_role_behind(plan, shard, role, read) for role in members.behind if role in shard.own]
    in_turns = None
    if len(shard.own) > 1 and members.in_fixed_order and shard.encodes:
        in_turns, encoding = _encoding_in_turns(plan, shard, made, kept_batches)
    else:
        encoding = _encoding_roles(plan, shard, made, kept_batches)
    # A role that waits for bytes would keep the other from its turn, or other tensor ranks from their encoder batch.
    # So would one that waits for other ranks inside of a pass, where others wait for what several microbatches read.
    # So would one that gives gradients back to ranks that wait for others inside of a microbatch.
    waited_for = bool(members.colocated) or plan.encoded_as is not None or bool(members.behind)
    # Ranks of a stage wait for each other inside of a pass, where those of the next one wait for what they read.
    # So would one whose stages hand on to each other in a circle, which read them in another order than they are made.
    some_in_turns = members.in_fixed_order and (waited_for or bool(members.pipelines))
    some_in_turns |= members.pipeline.chunks > 1
    some_in_turns |= bool(members.searched)  # each waits for its next work only
    makes_too = trunk in members.pipelines or any(role in members.colocated for role in members.behind)  # the trunk
    reads_too = sum(role in members.colocated for role in (*members.behind, *members.pipelines))
    holds_all = some_in_turns or any(members.meeting(role).ranks > 1 for role in members.producers)
    between = [*rows_between(plan, members)]
    inside = {hidden_states(each.role) for each in between if each.rows}
    roles += encoding
    program = StepProgram(
        {role.role: role for role in roles},
        (*_made_rows(plan, made), *(each.rows for each in between)),
        tuple(sorted({entry.modality for entry in plan.entries} | inside)),
        len(plan.microbatches[0]),
        members.producers_per_rank + (makes_too and bool(members.colocated)),
        1 + reads_too,
        in_turns=in_turns,
        holds_all=holds_all,
        read_rows=_read_rows(plan, between) if holds_all else (),
    )
    if not members.searched:
        return program
    parts = {role: stage_name(role, shard.stages[role]) if role in shard.stages else role for role in shard.own}
    own_ranks = {members.searched[part][shard.own[role]] for role, part in parts.items()}
    searched = searched_step(plan, members, kept_batches, row_bytes, own_ranks)
    return replace(in_searched_order(program, shard, searched), row_bytes=row_bytes)


def _trunk_role(
    plan: StepPlan,
    shard: RankShard,
    made: Mapping[BatchOf, Sequence[int]],
    read: Mapping[BatchOf, Sequence[int]],
) -> RankRole:
    """A rank's part in the trunk.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        made: batch -> the entries that it makes.
        read: batch -> the entries that it reads.
    """
    role, member = shard.members.trunk, shard.own[shard.members.trunk]
    microbatches = [BatchOf(role, member, number) for number in range(len(plan.batches[role][member]))]
    pads, stage = bool(shard.members.meeting(role).passes), shard.stages.get(role, 0)
    order = trunk_order(plan, shard.members, stage)
    batches = {
        each.number: _reading_batch(
            plan, shard.members, each, read.get(each, ()), _made_entries(plan, made.get(each, ()))
        )
        for each in microbatches
        if len(plan.batches[role][member][each.number]) or pads
    }
    due = tuple(range(len(microbatches)))
    found = RankRole(role, member, batches, order.passes, due, order.answered, reads=True)
    if role in shard.stages:
        found = in_stages(plan, shard, found, stage_order(len(due), shard.members.pipeline, stage))
    passes = tuple((kind, place) for kind, place in found.passes if place in found.batches)
    makes = bool(shard.members.behind) or any(batch.made for batch in found.batches.values())
    return replace(found, passes=passes, makes=makes)


def _role_behind(plan: StepPlan, shard: RankShard, role: str, read: Mapping[BatchOf, Sequence[int]]) -> RankRole:
    """A rank's part in a role behind the trunk: each batch backward at once, as nobody waits for what it makes.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        role: the role.
        read: batch -> the entries that it reads.
    """
    member = shard.own[role]
    meets = bool(shard.members.meeting(role).passes)
    turns = plan.turns_of(role) if meets else plan.turns[role][member]
    number_of = {turn: number for number, turn in enumerate(plan.turns[role][member])}
    batches = {}
    for place, turn in enumerate(turns):
        batch = BatchOf(role, member, number_of.get(turn, PADDING))
        batches[place] = (
            RankBatch(PADDING) if batch.number == PADDING else _reading_batch(plan, shard.members, batch, read[batch])
        )
    passes: list[Pass] = [(kind, place) for place in batches for kind in ("forward", "backward")]  # type: ignore[misc]
    due = tuple(position for position, _ in turns)
    return RankRole(role, member, batches, tuple(passes), due, due, reads=True)


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
        batches = _making_batches(plan, shard, role, entries, order)
        due = tuple(position for position, _ in order.turns)
        whole = RankRole(role, member, batches, order.passes, due, order.until, makes=True)
        found.append(_of_own_stage(plan, shard, whole))
    return found


def _of_own_stage(plan: StepPlan, shard: RankShard, whole: RankRole) -> RankRole:
    """A rank's part in a role that encodes, as far as its stage goes.

    All stages come to the batches in one order, so none waits for what comes later in that of another.
    """
    alike = [ChunkPass(kind, 0, place) for kind, place in whole.passes]
    return in_stages(plan, shard, whole, alike) if whole.role in shard.stages else whole


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
    turns, until, joint = roles_in_turns(plan, shard.members, shard.encodes, kept_batches)
    roles = []
    for role in shard.encodes:
        member = shard.own[role]
        own = turns[role] if shard.members.meeting(role).passes else plan.turns[role][member]
        passes = tuple(each for name, each in joint.passes if name == role and turns[role][each[1]] in own)
        in_order = MemberOrder(turns[role], passes, joint.recomputed[role])
        batches = _making_batches(plan, shard, role, entries, in_order)
        due = tuple(position for position, _ in turns[role])
        roles.append(_of_own_stage(plan, shard, RankRole(role, member, batches, passes, due, until[role], makes=True)))
    has = {role.role: role.batches for role in roles}
    order_of_all = [(role, each) for role, each in joint.passes if each[1] in has[role]]
    return tuple(Work(BatchOf(role, shard.own[role], place), kind) for role, (kind, place) in order_of_all), roles


def _making_batches(
    plan: StepPlan, shard: RankShard, role: str, entries: Mapping[BatchOf, Sequence[int]], order: MemberOrder
) -> dict[int, RankBatch]:
    """A member's batches by place, and those that it encodes for nothing."""
    member, members = shard.own[role], shard.members
    number_of = {turn: number for number, turn in enumerate(plan.turns[role][member])}
    batches: dict[int, RankBatch] = {}
    for place in dict.fromkeys(place for _, place in order.passes):
        number = number_of.get(order.turns[place], PADDING)
        made = by_stages(_made_entries(plan, entries.get(BatchOf(role, member, number), ())), members)
        batches[place] = RankBatch(number, made, recomputes=place in order.recomputed)
    return batches


def _made_entries(plan: StepPlan, numbers: Sequence[int]) -> tuple[MadeEntry, ...]:
    found = ((number, plan.entries[number]) for number in numbers)
    return tuple(MadeEntry(number, entry.modality, entry.rows, entry.members) for number, entry in found)


def _made_rows(
    plan: StepPlan, made: Mapping[BatchOf, Sequence[int]]
) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
    """For each member that is read, of each of its batches the modality, and the rows of its entries."""
    found: dict[tuple[str, int], list[tuple[str, tuple[int, ...]]]] = {maker: [] for maker in plan.makers}
    found |= {(batch.role, batch.member): [] for batch in made}
    for batch, numbers in made.items():
        rows = tuple(plan.entries[number].rows for number in numbers)
        found[batch.role, batch.member].append((plan.entries[numbers[0]].modality, rows))
    return tuple(map(tuple, found.values()))


def _read_rows(plan: StepPlan, between: Sequence[RowsBetween]) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
    """For each member that reads, the modality and rows of every entry that it reads.

    Args:
        plan: of the step.
        between: what stages make of each member's batches, which the next ones read.
    """
    read: dict[tuple[str, int], list[tuple[str, tuple[int, ...]]]] = {}
    for entry in plan.entries:
        for member in entry.members:
            read.setdefault(member, []).append((entry.modality, (entry.rows,)))
    for role, number, rows in between:
        read.setdefault((role, number), []).extend(rows)
    return tuple(map(tuple, read.values()))


def _reading_batch(
    plan: StepPlan, members: StepMembers, batch: BatchOf, numbers: Sequence[int], made: tuple[MadeEntry, ...] = ()
) -> RankBatch:
    rows: dict[str, int] = {}
    read: dict[int, ReadEntry] = {}
    for modality in sorted({plan.entries[entry].modality for entry in numbers}):  # as one process has them, by name
        rows[modality], places = _places(plan, plan.media_of(batch, modality))
        for entry in numbers:
            if (found := plan.entries[entry]).modality == modality:
                maker = part_names(found.maker.role, members.pipeline_of(found.maker.role))[-1]
                read[entry] = _read_entry(plan, entry, (maker, found.maker.member), batch, places)
    return RankBatch(batch.number, made, tuple(read[entry] for entry in numbers), rows)


def _read_entry(
    plan: StepPlan, entry: int, maker: tuple[str, int], batch: BatchOf, places: Mapping[int, Sequence[int]]
) -> ReadEntry:
    """An entry as a batch reads it, given who makes it, and the places where the rows of each media item begin."""
    found = plan.entries[entry]
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
        maker,
        _joined([(places[item][0], length) for item, length in zip(media, lengths, strict=True)]),
        tuple(again),
        part=found.members.index(member),
        answers=batch.number == own[-1],
        early=batch.number > found.readers[0].number,
    )


def _places(plan: StepPlan, media: IntArray) -> tuple[int, dict[int, list[int]]]:
    """Finds the places of the rows of a batch's media items of one modality.

    Args:
        plan: the step's plan.
        media: the media items, in the order in which their rows are read.

    Returns:
        rows in all; and for each media item of which some are made the first row of it, wherever it appears.
    """
    sizes = plan.sizes
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
