"""How long a run would take if nothing but the user's computing took time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.emulation import EmulatedCost
from flowtrain_lightning.allocator import BACKBONE, ENCODER, Allocation
from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.packing.policies.forwards_first import recomputed_batches
from flowtrain_lightning.packing.role_graph import Edge
from flowtrain_lightning.packing.simulator import simulate_steps
from flowtrain_lightning.packing.step_work import StepRules, step_work


@dataclass(frozen=True)
class Rules:
    """What decides the order of a step.

    Attributes:
        allocation: which ranks play which role.
        cost: what computing costs.
        kept_batches: encoder batches whose activations each encoder rank keeps.
        encoder_first: no microbatch begins before all encoder forwards of the step are done.
    """

    allocation: Allocation
    cost: EmulatedCost
    kept_batches: int
    encoder_first: bool = False


def step_ends(plans: Sequence[StepPlan], rules: Rules) -> list[float]:
    """When the backbone has ended each of some consecutive steps, in seconds since the first began.

    Moving features and gradients, planning, loading and optimizers take no time.
    """
    order = StepRules(
        {role: rules.allocation.members(role) for role in (BACKBONE, ENCODER)},
        [Edge(ENCODER, BACKBONE)],
        in_flight={ENCODER: rules.kept_batches},
        meets=rules.allocation.meets,
        producers_first=rules.encoder_first,
    )
    cost, kept = rules.cost, rules.kept_batches
    seconds = {role: partial(cost.batch, role) for role in (BACKBONE, ENCODER)}
    works = [step_work(plan, seconds, recomputed_batches(plan, kept)) for plan in plans]
    return simulate_steps(works, order).step_ends
