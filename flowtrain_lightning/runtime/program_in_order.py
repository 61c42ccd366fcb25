"""A rank's program where one order of all works of the step was searched: it does its own of them, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.packing.searched.order_of_step import SearchedStep
from flowtrain_lightning.packing.stage_entries import stage_name
from flowtrain_lightning.packing.step_graph import BatchOf, Pass
from flowtrain_lightning.runtime.program import RankBatch, RankRole, StepProgram


def in_searched_order(program: StepProgram, shard: RankShard, searched: SearchedStep) -> StepProgram:
    """The same works in the order that was searched.

    Args:
        program: of the rank, whose roles work by their rules.
        shard: which rank it is.
        searched: the order of all works of the step.
    """
    roles = dict[str, RankRole]()
    name_of = {role: stage_name(role, shard.stages[role]) if role in shard.stages else role for role in program.roles}
    for role, each in program.roles.items():
        passes = searched.passes(name_of[role], each.member)
        batches = {}
        for place, batch in each.batches.items():
            named = BatchOf(name_of[role], each.member, place)
            batches[place] = replace(batch, recomputes=named in searched.recomputed, moves=named in searched.moved)
        roles[role] = replace(each, passes=passes, batches=_read_once(batches, passes) if each.reads else batches)
    role_of = {name: role for role, name in name_of.items()}
    own = searched.own({(name_of[role], each.member) for role, each in roles.items()})
    works = (work._replace(batch=work.batch._replace(role=role_of[work.batch.role])) for work in own)
    return replace(program, roles=roles, searched=tuple(works), _sizes={})


def _read_once(batches: Mapping[int, RankBatch], passes: Sequence[Pass]) -> dict[int, RankBatch]:
    """The batches by place: of those that read an entry the first in this order takes it, the last answers."""
    places: dict[str, list[int]] = {kind: [place for each, place in passes if each == kind] for kind, _ in passes}
    first = {read.entry: place for place in reversed(places.get("forward", ())) for read in batches[place].read}
    last = {read.entry: place for place in places.get("backward", ()) for read in batches[place].read}
    return {
        place: replace(
            batch,
            read=tuple(
                read._replace(early=first[read.entry] != place, answers=last[read.entry] == place)
                for read in batch.read
            ),
        )
        for place, batch in batches.items()
    }
