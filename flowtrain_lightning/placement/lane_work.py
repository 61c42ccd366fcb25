"""Lists the work of an allocation's lanes in every step, and its rules, for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from flowtrain_lightning.allocator import BACKBONE, ENCODER, ROLES, Allocation, Layout
from flowtrain_lightning.packing import IntArray, StepPlan
from flowtrain_lightning.packing.policies.member_orders import member_orders
from flowtrain_lightning.packing.role_graph import Edge
from flowtrain_lightning.packing.step_graph import any_binds
from flowtrain_lightning.packing.step_plan import Turn
from flowtrain_lightning.packing.step_work import STEPS_AHEAD, PassTimes, StepRules, StepWork, TimedBatch, step_work
from flowtrain_lightning.placement.layout_costs import LayoutCosts, ModelledLayoutCosts


def _priced(plans: Sequence[StepPlan], costs: LayoutCosts, role: str) -> Callable[[IntArray], PassTimes]:
    """Seconds of a role's batches by their lengths, for all batches of some steps at once, each kind once."""
    kinds: dict[bytes, IntArray] = {}
    for plan in plans:
        if role == BACKBONE:
            lengths, batches = plan.sizes.tokens, plan.microbatches
        else:
            lengths, batches = plan.sizes.media_patches, plan.encoder_batches
        members = (lengths[batch] for of_rank in batches for batch in of_rank if len(batch))
        kinds |= {each.tobytes(): each for each in members}
    if isinstance(costs, ModelledLayoutCosts):  # one by one it would take a hundred times as long
        passes = dict(zip(kinds, costs.batches(role, list(kinds.values())), strict=True))
    else:
        passes = {kind: costs.batch(role, each) for kind, each in kinds.items()}
    return lambda lengths: passes[lengths.tobytes()]


def lane_work(
    plans: Sequence[StepPlan], allocation: Allocation, costs: LayoutCosts, kept_batches: int
) -> tuple[list[StepWork], StepRules]:
    """Lists each rank's work in some steps, as a lane for each of its roles.

    The end of a step is one more batch of every member of the backbone, with a forward alone, and, where the encoder
    trains, a part of the backward of every encoder member's last batch.

    Args:
        plans: the steps, planned for the allocation.
        allocation: which ranks do what.
        costs: what it takes.
        kept_batches: encoder batches whose activations each encoder rank keeps.
    """
    encoder = allocation.layouts[ENCODER]
    waits = costs.encoder_trains or (encoder.shares_weights and allocation.placement == "mixed")
    rules = StepRules(
        {role: allocation.members(role) for role in (BACKBONE, ENCODER)},
        [Edge(ENCODER, BACKBONE)],
        in_flight={ENCODER: kept_batches},
        meets=allocation.meets,
        steps_ahead=0 if waits else STEPS_AHEAD,
    )
    passes = {role: _priced(plans, costs, role) for role in ROLES}
    works = []
    for plan in plans:
        recomputed = _recomputed(plan, allocation, kept_batches) if costs.encoder_trains else None
        works.append(_meeting(_step_work(plan, costs, passes, recomputed), encoder))
    return works, rules


def _meeting(work: StepWork, encoder: Layout) -> StepWork:
    """The same, where encoder ranks that need each other in a forward or a backward are as long at it as the slowest.

    A rank that has no batch where others have one encodes something small, whose time is left out.
    """
    together = encoder.meets.members
    if together == 1:
        return work
    joint: list[list[TimedBatch]] = []
    for first in range(0, encoder.data, together):
        group = work[ENCODER][first : first + together]
        at: dict[Turn, list[TimedBatch]] = {}
        for batch in (batch for batches in group for batch in batches):
            at.setdefault(batch.turn, []).append(batch)
        forward = {turn: max(each.forward for each in found) for turn, found in at.items()}
        backward = {turn: max(each.backward for each in found) for turn, found in at.items()}
        for batches in group:
            slowest = [replace(each, backward=backward[each.turn]) for each in batches]
            if "forward" in encoder.meets.passes:
                slowest = [replace(each, forward=forward[each.turn]) for each in slowest]
            joint.append(slowest)
    return {**work, ENCODER: joint}


def _recomputed(plan: StepPlan, allocation: Allocation, kept_batches: int) -> list[set[int]]:
    """For each encoder member the numbers of the batches that it recomputes in the order that the runtime gives it."""
    orders = member_orders(
        plan,
        range(len(plan.encoder_batches)),
        kept_batches,
        meet=bool(allocation.layouts[ENCODER].meets.passes),
        colocated={encoder for encoder, _ in allocation.colocated_lanes},
        in_fixed_order=any_binds(allocation.meets),
        readers_meet=allocation.layouts[BACKBONE].meets.together,
    )
    again = [{order.turns[place] for place in order.recomputed} for order in orders]
    return [
        {number for number, turn in enumerate(own) if turn in turns}
        for own, turns in zip(plan.encoder_turns, again, strict=True)
    ]


def _step_work(
    plan: StepPlan,
    costs: LayoutCosts,
    passes: Mapping[str, Callable[[IntArray], PassTimes]],
    recomputed: Sequence[Collection[int]] | None,
) -> StepWork:
    """The same by data-parallel member."""
    ends = {role: sum(costs.end_of_step(role)) for role in ROLES}
    work = step_work(plan, passes[BACKBONE], passes[ENCODER], recomputed)
    encoding = work[ENCODER]
    if costs.encoder_trains:
        encoding = [
            [*batches[:-1], *(replace(last, backward=last.backward + ends[ENCODER]) for last in batches[-1:])]
            for batches in encoding
        ]
    return {BACKBONE: [[*batches, TimedBatch(ends[BACKBONE], 0.0)] for batches in work[BACKBONE]], ENCODER: encoding}
