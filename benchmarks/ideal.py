"""How long a run would take if nothing but the user's computing took time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.emulation import EmulatedCost
from flowtrain_lightning.allocator import BACKBONE, ENCODER, Allocation
from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.packing.simulator import recomputed_batches, simulate_steps
from flowtrain_lightning.packing.step_work import Lanes, step_work


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
    ranks, layouts = rules.allocation.ranks, rules.allocation.layouts
    lanes = Lanes(
        tuple(ranks[BACKBONE]),
        tuple(ranks[ENCODER]),
        sync_every="microbatch" if layouts[BACKBONE].shares_weights else "step",
        kept_batches=rules.kept_batches,
        encoder_first=rules.encoder_first,
    )
    cost, kept = rules.cost, rules.kept_batches
    works = [step_work(p, cost.microbatch, cost.encoder_batch, recomputed_batches(p, kept)) for p in plans]
    return simulate_steps(works, lanes).backbone_ends
