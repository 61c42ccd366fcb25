"""Lists the work of an allocation's lanes in every step, and its rules, for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.packing import IntArray, StepPlan
from flowtrain_lightning.packing.policies.member_orders import member_orders, roles_in_turns
from flowtrain_lightning.packing.policies.trunk_order import most_open
from flowtrain_lightning.packing.searched.order_of_step import in_searched_order, searched_step
from flowtrain_lightning.packing.stage_entries import chunk_names, part_names
from flowtrain_lightning.packing.step_graph import Meeting
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_plan import Turn
from flowtrain_lightning.packing.step_work import STEPS_AHEAD, PassTimes, StepRules, StepWork, TimedBatch, step_work
from flowtrain_lightning.placement.layout_costs import LayoutCosts, ModelledLayoutCosts


def lane_work(
    plans: Sequence[StepPlan], allocation: Allocation, costs: LayoutCosts, kept_batches: int
) -> tuple[list[StepWork], StepRules]:
    """Lists each rank's work in some steps, as a lane for each of its roles, or for its stage of one.

    The end of a step is one more batch of every member of the trunk, with a forward alone, and, where encoders train, a
    part of the backward of the last batch of every member that encodes. Where a role generates, it is a part of the
    last backward of the trunk and of that role, too.

    Args:
        plans: the steps, planned for the allocation.
        allocation: which ranks do what.
        costs: what it takes.
        kept_batches: encoder batches whose activations each rank keeps.
    """
    producers, members, row_bytes = allocation.producers, allocation.step_members(), dict[str, float]()
    if members.activation_bytes is not None and isinstance(costs, ModelledLayoutCosts):
        row_bytes = costs.row_bytes
    else:  # a profile does not say what batches keep
        members = replace(members, activation_bytes=None)
    trunk, behind = allocation.trunk, allocation.graph.behind
    parts = {role: part_names(role, members.pipeline_of(role)) for role in (trunk, *behind, *producers)}
    producing = [name for role in producers for name in parts[role]]
    works_ahead = allocation.works_ahead and not costs.encoder_trains
    rules = _rules(allocation, members, parts, kept_batches, works_ahead)
    seconds = {
        name: _priced(plans, costs, role, name)
        for role in parts
        for name in chunk_names(role, members.pipeline_of(role)) or (role,)
    }
    ends = {
        name: sum(costs.end_of_step(name)) * (costs.encoder_trains or name not in producing) for name in rules.ranks
    }
    closing = {*rules.ranks} if members.searched else {*rules.ranks} - {*(rules.ranks if behind else producing)}
    works: list[StepWork] = []
    for plan in plans:
        recomputed = _recomputed(plan, members, kept_batches) if costs.encoder_trains else None
        work = step_work(plan, seconds, recomputed, members.pipelines, costs.on_the_way)
        if members.searched:
            work = in_searched_order(
                work, searched_step(plan, members, kept_batches, row_bytes), trains=recomputed is not None
            )
        work = _with_ends(work, ends, closing)
        works.append(
            {
                name: batches if name in parts[trunk] else _as_they_meet(batches, rules.meets[name])
                for name, batches in work.items()
            }
        )
    return works, rules


def _rules(
    allocation: Allocation,
    members: StepMembers,
    parts: Mapping[str, Sequence[str]],
    kept_batches: int,
    works_ahead: bool,
) -> StepRules:
    """The rules by which lanes wait for each other, a lane for each part of a role: its stages, or the role itself."""
    trunk, behind = allocation.trunk, allocation.graph.behind
    producing = [name for role in allocation.producers for name in parts[role]]
    return StepRules(
        {
            name: allocation.members_in_stage(role, stage)
            for role, names in parts.items()
            for stage, name in enumerate(names)
        },
        [
            edge._replace(producer=producer, consumer=consumer)
            for edge in allocation.graph.edges
            for producer in parts[edge.producer]
            for consumer in parts[edge.consumer]
        ],
        in_flight=({trunk: most_open(members)} if behind else {}) | dict.fromkeys(producing, kept_batches),
        stages={name: stage for stage, name in enumerate(parts[trunk]) if trunk in members.pipelines},
        pipeline=members.pipeline,
        meets={name: allocation.meets[role] for role, names in parts.items() for name in names},
        steps_ahead=STEPS_AHEAD if works_ahead else 0,
    )


def _priced(plans: Sequence[StepPlan], costs: LayoutCosts, role: str, part: str) -> Callable[[IntArray], PassTimes]:
    """Seconds of a role's batches in a part of it, by their lengths, for all batches of some steps at once."""
    kinds: dict[bytes, IntArray] = {}
    for plan in plans:
        lengths = plan.lengths(role)
        found = (lengths[batch] for own in plan.batches[role] for batch in own if len(batch))
        kinds |= {each.tobytes(): each for each in found}
    if isinstance(costs, ModelledLayoutCosts):  # one by one it would take a hundred times as long
        passes = dict(zip(kinds, costs.batches(part, list(kinds.values())), strict=True))
    else:
        passes = {kind: costs.batch(part, each) for kind, each in kinds.items()}
    return lambda lengths: passes[lengths.tobytes()]


def _with_ends(work: StepWork, ends: Mapping[str, float], closing: Collection[str]) -> StepWork:
    """The same, and what the end of a step takes for each role or stage.

    Args:
        work: of a step.
        ends: seconds of its end.
        closing: whose end is a batch of its own.
    """
    ended = {}
    for name, of_name in work.items():
        end = ends[name]
        if name in closing:
            ended[name] = [[*batches, TimedBatch(end, 0.0, closes=True)] for batches in of_name]
        else:
            ended[name] = [
                [*batches[:-1], *(replace(last, backward=last.backward + end) for last in batches[-1:])]
                for batches in of_name
            ]
    return ended


def _as_they_meet(of_role: Sequence[Sequence[TimedBatch]], meeting: Meeting) -> list[list[TimedBatch]]:
    """The same, where members that need each other in a pass over media are as long at it as the slowest.

    A member that has no batch where others have one computes something small, whose time is left out.
    """
    if not meeting.passes:
        return [list(batches) for batches in of_role]
    joint: list[list[TimedBatch]] = []
    for first in range(0, len(of_role), meeting.members):
        group = of_role[first : first + meeting.members]
        at: dict[Turn, list[TimedBatch]] = {}
        for batch in (batch for batches in group for batch in batches):
            at.setdefault(batch.turn, []).append(batch)
        longest = {
            turn: {kind: max(getattr(batch, kind) for batch in batches) for kind in meeting.passes}
            for turn, batches in at.items()
        }
        joint += [[replace(each, **longest[each.turn]) for each in own] for own in group]
    return joint


def _recomputed(plan: StepPlan, members: StepMembers, kept_batches: int) -> dict[str, list[set[int]]]:
    """Role -> the numbers of the batches that each member recomputes in the order that the runtime gives it."""
    again: dict[str, list[set[Turn]]] = {}
    if members.in_fixed_order and members.producers_per_rank > 1:
        turns, _, joint = roles_in_turns(plan, members, members.producers, kept_batches)
        for role, places in joint.recomputed.items():
            again[role] = [{turns[role][place] for place in places}] * members.counts[role]
    else:
        for role in members.producers:
            orders = member_orders(plan, members, role, kept_batches)
            again[role] = [{order.turns[place] for place in order.recomputed} for order in orders]
    return {
        role: [
            {number for number, turn in enumerate(own) if turn in turns}
            for own, turns in zip(plan.turns[role], of_role, strict=True)
        ]
        for role, of_role in again.items()
    }
