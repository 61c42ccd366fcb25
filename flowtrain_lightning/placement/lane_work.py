"""What the lanes of an allocation compute in every step, and by which rules: what the simulator is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from flowtrain_lightning.allocator import BACKBONE, ENCODER, ROLES, Allocation, Layout
from flowtrain_lightning.packing import IntArray, StepPlan
from flowtrain_lightning.packing.simulator import recomputed_batches
from flowtrain_lightning.packing.step_plan import Turn
from flowtrain_lightning.packing.step_work import EncoderWork, Lanes, StepWork, step_work
from flowtrain_lightning.packing.work_order import lockstep_order
from flowtrain_lightning.placement.layout_costs import LayoutCosts, ModelledLayoutCosts

STEPS_AHEAD = 8
"""Later steps that a frozen encoder may have begun: the runtime's own limit, which needs torch to be read."""


@dataclass(frozen=True)
class _PricedBatches:
    """What all batches of some steps take, asked once for all of them.

    Attributes:
        seconds: role -> the lengths in a batch, as bytes -> forward and backward.
    """

    seconds: Mapping[str, Mapping[bytes, tuple[float, float]]]

    @classmethod
    def of(cls, plans: Sequence[StepPlan], costs: LayoutCosts) -> _PricedBatches:
        """The batches of these plans, each kind once."""
        found: dict[str, dict[bytes, IntArray]] = {role: {} for role in ROLES}
        for plan in plans:
            for role, lengths, batches in (
                (BACKBONE, plan.sizes.tokens, plan.microbatches),
                (ENCODER, plan.sizes.media_patches, plan.encoder_batches),
            ):
                members = (lengths[batch] for of_rank in batches for batch in of_rank if len(batch))
                found[role] |= {each.tobytes(): each for each in members}
        return cls(
            {
                role: dict(zip(kinds, _priced(costs, role, list(kinds.values())), strict=True))
                for role, kinds in found.items()
            }
        )

    def microbatch(self, tokens: IntArray) -> float:
        """Forward and backward together."""
        return sum(self.seconds[BACKBONE][tokens.tobytes()])

    def encoder_batch(self, patches: IntArray) -> tuple[float, float]:
        """Forward, and backward."""
        return self.seconds[ENCODER][patches.tobytes()]


def _priced(costs: LayoutCosts, role: str, lengths: Sequence[IntArray]) -> list[tuple[float, float]]:
    """Forward and backward of each batch; of a microbatch both together, as the backward."""
    if isinstance(costs, ModelledLayoutCosts):
        return costs.batches(role, lengths)  # one by one it would take a hundred times as long
    if role == BACKBONE:
        return [(0.0, costs.microbatch(each)) for each in lengths]
    return [costs.encoder_batch(each) for each in lengths]


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
        in_fixed_order=allocation.in_lockstep,
    )
    some_in_fixed_order = bool(allocation.colocated_lanes) and lanes.in_fixed_order
    seconds = _PricedBatches.of(plans, costs)
    works = []
    for plan in plans:
        if not costs.encoder_trains:
            recomputed: Sequence[Collection[int]] | None = None
        elif encoder.sums_in_step or some_in_fixed_order:
            recomputed = _recomputed_in_lockstep(plan, kept_batches, pads=encoder.sums_in_step)
        else:
            recomputed = recomputed_batches(plan, kept_batches)
        works.append(_meeting(_step_work(plan, costs, seconds, recomputed), encoder))
    return [work.on_ranks(backbone.ranks_of_member, encoder.ranks_of_member) for work in works], lanes


def _ranks_in_step(layout: Layout) -> int:
    """Neighbouring ranks that begin every microbatch together."""
    return layout.ranks if layout.sums_in_step and not layout.gathers_weights else layout.ranks_of_shard_group


def _meeting(work: StepWork, encoder: Layout) -> StepWork:
    """The same, where encoder ranks that need each other in a forward or a backward are as long at it as the slowest.

    A rank that has no batch where others have one encodes something small, whose time is left out.
    """
    together = encoder.data // encoder.replicas
    if together == 1 or not encoder.sums_in_step:
        return work
    joint: list[list[EncoderWork]] = []
    for first in range(0, encoder.data, together):
        group = work.encoder_batches[first : first + together]
        at: dict[Turn, list[EncoderWork]] = {}
        for batch in (batch for batches in group for batch in batches):
            at.setdefault(batch.turn, []).append(batch)
        forward = {turn: max(each.forward for each in found) for turn, found in at.items()}
        backward = {turn: max(each.backward for each in found) for turn, found in at.items()}
        for batches in group:
            slowest = [replace(each, backward=backward[each.turn]) for each in batches]
            if encoder.gathers_weights:
                slowest = [replace(each, forward=forward[each.turn]) for each in slowest]
            joint.append(slowest)
    return StepWork(work.microbatches, joint)


def _recomputed_in_lockstep(plan: StepPlan, kept_batches: int, pads: bool) -> list[set[int]]:
    """For each encoder rank the numbers of the batches that it recomputes, where ranks work in `lockstep_order`.

    Args:
        plan: the step's.
        kept_batches: encoder batches whose activations each encoder rank keeps.
        pads: a rank that has no batch in its turn, where others have one, encodes something small then.
    """
    found = []
    for own in plan.encoder_turns:
        turns = plan.all_encoder_turns if pads else own
        _, recomputed = lockstep_order([position for position, _ in turns], max(kept_batches, 1))
        again = {turn for number, turn in enumerate(turns) if number in recomputed or not kept_batches}
        found.append({number for number, turn in enumerate(own) if turn in again})
    return found


def _step_work(
    plan: StepPlan, costs: LayoutCosts, seconds: _PricedBatches, recomputed: Sequence[Collection[int]] | None
) -> StepWork:
    """The same by data-parallel member."""
    ends = {role: sum(costs.end_of_step(role)) for role in ROLES}
    work = step_work(plan, seconds.microbatch, seconds.encoder_batch, recomputed)
    encoding = work.encoder_batches
    if costs.encoder_trains:
        encoding = [
            [*batches[:-1], *(replace(last, backward=last.backward + ends[ENCODER]) for last in batches[-1:])]
            for batches in work.encoder_batches
        ]
    return StepWork([[*of_rank, ends[BACKBONE]] for of_rank in work.microbatches], encoding)
