"""What the lanes of an allocation compute in every step, and by which rules: what the simulator is given."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from flowtrain_lightning.allocator import BACKBONE, ENCODER, ROLES, Allocation, Layout
from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.packing.simulator import recomputed_batches
from flowtrain_lightning.packing.step_work import Lanes, StepWork, step_work
from flowtrain_lightning.placement.layout_costs import LayoutCosts

STEPS_AHEAD = 8
"""Later steps that a frozen encoder may have begun: the runtime's own limit, which needs torch to be read."""


def lane_work(
    plans: Sequence[StepPlan], allocation: Allocation, costs: LayoutCosts, kept_batches: int
) -> tuple[list[StepWork], Lanes]:
    """What every rank computes in some steps, as a lane for each role that it has.

    The end of a step is one more microbatch of every backbone lane, and, where the encoder trains, a part of the
    backward of every encoder lane's last batch.

    Args:
        plans: the steps, planned for the allocation.
        allocation: which ranks do what.
        costs: what it takes.
        kept_batches: encoder batches whose activations each encoder rank keeps.
    """
    backbone, encoder = allocation.layouts[BACKBONE], allocation.layouts[ENCODER]
    waits = costs.encoder_trains or (encoder.shares_weights and allocation.placement == "mixed")
    lanes = Lanes(
        allocation.ranks[BACKBONE],
        allocation.ranks[ENCODER],
        sync_every="step",
        kept_batches=kept_batches,
        steps_ahead=0 if waits else STEPS_AHEAD,
        backbone_group=_ranks_in_step(backbone),
        encoder_group=encoder.ranks_of_member,
        in_turns=allocation.in_lockstep,
    )
    lockstep = encoder.sums_in_step or (bool(allocation.colocated_lanes) and lanes.in_turns)
    works = [_step_work(plan, costs, kept_batches, lockstep) for plan in plans]
    return [work.on_ranks(backbone.ranks_of_member, encoder.ranks_of_member) for work in works], lanes


def _ranks_in_step(layout: Layout) -> int:
    """Neighbouring ranks that begin every microbatch together."""
    return layout.ranks if layout.sums_in_step and not layout.gathers_weights else layout.ranks_of_shard_group


def _step_work(plan: StepPlan, costs: LayoutCosts, kept_batches: int, lockstep: bool) -> StepWork:
    """The same by data-parallel member; encoder ranks in lockstep recompute all of their batches, or none."""
    ends = {role: sum(costs.end_of_step(role)) for role in ROLES}
    recomputed: Sequence[Collection[int]] | None = None
    if costs.encoder_trains and lockstep and kept_batches == 0:
        recomputed = [range(len(batches)) for batches in plan.encoder_batches]
    elif costs.encoder_trains and not lockstep:
        recomputed = recomputed_batches(plan, kept_batches)
    work = step_work(plan, costs.microbatch, costs.encoder_batch, recomputed)
    encoding = work.encoder_batches
    if costs.encoder_trains:
        encoding = [
            [*batches[:-1], *(replace(last, backward=last.backward + ends[ENCODER]) for last in batches[-1:])]
            for batches in work.encoder_batches
        ]
    return StepWork([[*of_rank, ends[BACKBONE]] for of_rank in work.microbatches], encoding)
