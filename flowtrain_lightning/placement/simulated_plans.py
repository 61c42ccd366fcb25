"""Modelled plans with the step that a simulation finds: samples packed by the packer, lanes that wait for each other.

The models of time know what ranks compute, and that separate roles wait for the first features and the last gradients.
How far ranks of an uneven step, ranks in lockstep and those that do both wait, only playing the step tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.allocator.workload import ENCODER_BATCHES_IN_FLIGHT
from flowtrain_lightning.packing import PackingError
from flowtrain_lightning.placement.cluster_part import part_of
from flowtrain_lightning.placement.drawn_steps import DrawnSteps, FilledSteps
from flowtrain_lightning.placement.layout_costs import ModelledLayoutCosts, ReadLayoutCosts
from flowtrain_lightning.placement.request import why_it_cannot_run
from flowtrain_lightning.placement.simulation import Simulation, simulate

MOST_RANKS = 64
"""Ranks that are simulated of larger clusters: a part in which every role has its share of ranks and of samples."""

_STEPS_OF_A_PART = 3
"""Steps that are simulated of a part: it has so many samples that steps hardly differ."""

_FEW = 640
"""Ranks up to which all are simulated where a step has no more samples than that: all wait for the longest sample,
which a part of the step need not have, and so few take some tenths of a second."""

_ENOUGH_SAMPLES, _ENOUGH_RANKS = 512, 1280
"""Samples, and ranks, of all simulated steps of so few together, at least."""


@dataclass(frozen=True)
class PlanSimulator:
    """Simulates plans of one set of problems on the same steps.

    Attributes:
        problems: role -> what was planned for.
        steps: drawn from the data.
        most_ranks: see `MOST_RANKS`; more where steps have few samples.
        encoder_activations: encoder batches whose activations each rank keeps.
    """

    problems: Problems
    steps: DrawnSteps | FilledSteps
    most_ranks: int = MOST_RANKS
    encoder_activations: int = ENCODER_BATCHES_IN_FLIGHT

    def simulated(self, plans: Sequence[ModelledPlan]) -> list[ModelledPlan]:
        """The plans with simulated times; as they are where the simulator does not play them."""
        found: list[ModelledPlan] = []
        for number, plan in enumerate(plans):
            before = next((place for place in range(number) if plans[place].is_laid_out_as(plan)), None)
            found.append(self._simulated(plan) if before is None else _timed_as(plan, found[before]))
        return found

    def seconds_reading(self, plan: ModelledPlan) -> float | None:
        """Seconds of a step whose features are read, not encoded, as fast as they are wanted; None: not played."""
        try:
            allocation = plan.allocation(self.problems.cluster.per_node)
            return self._played(allocation, ReadLayoutCosts(self.problems, allocation)).step_seconds
        except (PackingError, ValueError):
            return None

    def _simulated(self, plan: ModelledPlan) -> ModelledPlan:
        try:
            allocation = plan.allocation(self.problems.cluster.per_node)
            if why_it_cannot_run(allocation) is not None:
                return plan
            found = self._played(allocation, ModelledLayoutCosts(self.problems, allocation))
        except (PackingError, ValueError):  # fewer samples than a part of the cluster can share, say
            return plan
        seconds = found.step_seconds
        return replace(
            plan,
            seconds=seconds,
            samples_per_second=self.problems.load.items / seconds,
            idle={role: found.shares[role]["idle"] for role in plan.chosen},
            mfu=plan.mfu * plan.seconds / seconds,
        )

    def _played(self, allocation: Allocation, costs: ModelledLayoutCosts) -> Simulation:
        samples = self.problems.load.items
        if self.most_ranks < allocation.size <= _FEW and samples <= _FEW:
            enough = ceil(max(_STEPS_OF_A_PART, _ENOUGH_SAMPLES / samples, _ENOUGH_RANKS / allocation.size))
            part, steps = allocation, self.steps.part(1, enough)
        else:
            part, share = part_of(allocation, self.most_ranks)
            steps = self.steps if share == 1 else self.steps.part(share, _STEPS_OF_A_PART)
        return simulate(steps.packed(part), part, costs, self.encoder_activations)


def _timed_as(plan: ModelledPlan, other: ModelledPlan) -> ModelledPlan:
    """The plan with the times of one that is the same by another name."""
    names = ("seconds", "samples_per_second", "idle", "mfu")
    return replace(plan, **{name: getattr(other, name) for name in names})
