"""A rank's program where a role is in stages: what passes between these, and in which order a stage computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from flowtrain_lightning.data import RankShard, StepPlan
from flowtrain_lightning.data.loading.collate import PADDING_LENGTH
from flowtrain_lightning.packing.policies.virtual_stages import ChunkPass
from flowtrain_lightning.packing.stage_entries import (
    hidden_entry,
    hidden_states,
    part_names,
    slice_name,
)
from flowtrain_lightning.packing.step_graph import Pass
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.parallel.context_parallel import slices_of
from flowtrain_lightning.runtime.program import PADDING, MadeEntry, RankBatch, RankRole, ReadEntry


def in_stages(plan: StepPlan, shard: RankShard, whole: RankRole, order: Sequence[ChunkPass]) -> RankRole:
    """A rank's part in a role as its stage computes it.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        whole: its part if it had all layers.
        order: of the stage's passes.
    """
    count, chunks = len(whole.due), shard.members.pipeline_of(whole.role).chunks
    passes = tuple((each.kind, each.chunk * count + each.position) for each in order)
    batches = {
        chunk * count + place: _in_stage(plan, shard, whole.role, batch, chunk)
        for chunk in range(chunks)
        for place, batch in whole.batches.items()
    }
    due, until = whole.due * chunks, whole.until * chunks
    return replace(whole, batches=_read_once(batches, passes), passes=passes, due=due, until=until)


def by_stages(made: tuple[MadeEntry, ...], members: StepMembers) -> tuple[MadeEntry, ...]:
    """Entries that every stage of the roles that read them reads: positions may follow from them."""
    return tuple(
        each._replace(
            readers=tuple(
                (name, member) for role, member in each.readers for name in part_names(role, members.pipeline_of(role))
            )
        )
        for each in made
    )


def _read_once(batches: Mapping[int, RankBatch], passes: Sequence[Pass]) -> dict[int, RankBatch]:
    """The batches by place, where several read an entry for several chunks: the first takes it, the last answers."""
    kinds = {kind: [place for each, place in passes if each == kind and place in batches] for kind, _ in passes}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place in reversed(kinds.get("forward", ())):
        first |= {read.entry: place for read in batches[place].read}
    for place in kinds.get("backward", ()):
        last |= {read.entry: place for read in batches[place].read}

    def once(place: int, read: ReadEntry) -> ReadEntry:
        early, answers = read.early or first[read.entry] != place, read.answers and last[read.entry] == place
        return read._replace(early=early, answers=answers)

    return {
        place: replace(batch, read=tuple(once(place, read) for read in batch.read)) for place, batch in batches.items()
    }


def _in_stage(plan: StepPlan, shard: RankShard, role: str, batch: RankBatch, chunk: int) -> RankBatch:
    """A batch as one stage computes it: it reads what the whole role reads, and the stage before it."""
    if batch.number == PADDING:  # each stage computes on zeros, for which nobody waits
        return batch
    members, own, part = shard.members, shard.stages[role], shard.slices.get(role, 0)
    pipeline, slices = members.pipeline_of(role), members.slices.get(role, 1)
    run, name = pipeline.number(own, chunk), hidden_states(role)
    rows = slices_of(_hidden_rows(plan, role, shard.own[role], batch.number), slices)[part]
    member = shard.own[role] * slices + part
    # Each stage is a reader of its own, which gives back a part of the gradients; of its context ranks the first.
    read = tuple(
        each._replace(part=each.part * pipeline.stages + own, answers=each.answers and part == 0) for each in batch.read
    )
    made, rows_read = batch.made, dict(batch.rows_read)
    if run > 0:
        maker = slice_name(role, pipeline.stage_of(run - 1)), member
        entry = hidden_entry(plan, members, role, run - 1, member, batch.number)
        read = (*read, ReadEntry(entry, name, maker, (slice(0, rows),)))
        rows_read[name] = rows
    if run < pipeline.runs - 1:
        reader = slice_name(role, pipeline.stage_of(run + 1)), member
        made = (MadeEntry(hidden_entry(plan, members, role, run, member, batch.number), name, rows, (reader,)),)
    return replace(batch, made=made, read=read, rows_read=rows_read, chunk=chunk)


def _hidden_rows(plan: StepPlan, role: str, member: int, number: int) -> int:
    """Rows of hidden states of a batch: its tokens or patches, or tokens of padding."""
    items = plan.batches[role][member][number]
    return int(plan.lengths(role)[items].sum()) if len(items) else PADDING_LENGTH


class RowsBetween(NamedTuple):
    """The hidden states that a rank of one stage makes of its batches, and one of the next stage reads.

    Attributes:
        role: that is in stages.
        member: of the role.
        rows: of each batch its kind, and the rows at most.
    """

    role: str
    member: int
    rows: tuple[tuple[str, tuple[int, ...]], ...]


def rows_between(plan: StepPlan, members: StepMembers) -> Iterator[RowsBetween]:
    """What passes between the stages of all roles that are in stages."""
    for role, pipeline in members.pipelines.items():
        pads, slices = bool(members.meeting(role).passes), members.slices.get(role, 1)
        for member, batches in enumerate(plan.batches[role]):
            numbers = [number for number, own in enumerate(batches) if len(own) or pads]
            rows = [slices_of(_hidden_rows(plan, role, member, number), slices)[0] for number in numbers]
            yield RowsBetween(role, member, tuple((hidden_states(role), (each,)) for each in rows) * pipeline.chunks)
