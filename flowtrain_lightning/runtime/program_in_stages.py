"""A rank's program where the trunk is in stages: what passes between these, and in which order a stage computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flowtrain_lightning.data import RankShard, StepPlan
from flowtrain_lightning.data.loading.collate import PADDING_LENGTH
from flowtrain_lightning.packing.policies.trunk_order import stage_order
from flowtrain_lightning.packing.stage_entries import HIDDEN, hidden_entry, slice_name, stage_name
from flowtrain_lightning.packing.step_graph import Pass
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.parallel.context_parallel import slices_of
from flowtrain_lightning.runtime.program import MadeEntry, RankBatch, RankRole, ReadEntry


def in_stages(plan: StepPlan, shard: RankShard, whole: RankRole) -> RankRole:
    """A rank's part in the trunk as its stage computes it.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        whole: its part if it had all layers.
    """
    members, count = shard.members, len(whole.due)
    of_stage = stage_order(count, members.pipeline, shard.stage)
    passes = tuple((each.kind, each.chunk * count + each.position) for each in of_stage)
    batches = {
        chunk * count + number: _in_stage(plan, shard, batch, chunk)
        for chunk in range(members.virtual)
        for number, batch in whole.batches.items()
    }
    due, until = whole.due * members.virtual, whole.until * members.virtual
    return replace(whole, batches=_read_once(batches, passes), passes=passes, due=due, until=until)


def by_stages(made: tuple[MadeEntry, ...], members: StepMembers) -> tuple[MadeEntry, ...]:
    """Entries of a role that encodes, which every stage of the trunk reads: positions may follow from them."""
    if members.stages == 1:
        return made
    names = [stage_name(members.trunk, stage) for stage in range(members.stages)]
    return tuple(
        each._replace(readers=tuple((name, member) for _, member in each.readers for name in names)) for each in made
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


def _in_stage(plan: StepPlan, shard: RankShard, batch: RankBatch, chunk: int) -> RankBatch:
    """A microbatch as one stage computes it: it reads features, as every stage does, and the stage before it."""
    members, trunk, own = shard.members, shard.members.trunk, shard.stage
    pipeline = members.pipeline
    stage, stages = pipeline.number(own, chunk), pipeline.runs
    rows = slices_of(_hidden_rows(plan, shard.own[trunk], batch.number), members.slices)[shard.slice]
    member = shard.own[trunk] * members.slices + shard.slice
    # Each stage is a reader of its own, which gives back a part of the gradients; of its context ranks the first.
    read = tuple(
        each._replace(part=each.part * members.stages + own, answers=each.answers and shard.slice == 0)
        for each in batch.read
    )
    made: tuple[MadeEntry, ...] = ()
    rows_read = dict(batch.rows_read)
    if stage > 0:
        maker = slice_name(trunk, pipeline.stage_of(stage - 1)), member
        entry = hidden_entry(plan, stages, stage - 1, member, batch.number)
        read = (*read, ReadEntry(entry, HIDDEN, maker, (slice(0, rows),)))
        rows_read[HIDDEN] = rows
    if stage < stages - 1:
        reader = slice_name(trunk, pipeline.stage_of(stage + 1)), member
        made = (MadeEntry(hidden_entry(plan, stages, stage, member, batch.number), HIDDEN, rows, (reader,)),)
    return replace(batch, made=made, read=read, rows_read=rows_read, chunk=chunk)


def _hidden_rows(plan: StepPlan, member: int, number: int) -> int:
    """Rows of hidden states of a microbatch: its tokens, or those of padding."""
    samples = plan.microbatches[member][number]
    return int(plan.sizes.tokens[samples].sum()) if len(samples) else PADDING_LENGTH


def rows_between(plan: StepPlan, members: StepMembers) -> Iterator[tuple[tuple[str, tuple[int, ...]], ...]]:
    """For each member of the trunk what a rank of one stage makes of its microbatches: of each the rows at most."""
    pads = bool(members.meeting(members.trunk).passes)
    for member, batches in enumerate(plan.microbatches if members.stages > 1 else ()):
        numbers = [number for number, own in enumerate(batches) if len(own) or pads]
        rows = [slices_of(_hidden_rows(plan, member, number), members.slices)[0] for number in numbers]
        yield tuple((HIDDEN, (each,)) for each in rows) * members.virtual
