"""Which plans are compared: the fastest of every kind, what the planner recommends, and what peers would run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from flowtrain_lightning.allocator import BACKBONE, ENCODER, ModelledCosts, SearchSpace, choose_placement
from flowtrain_lightning.allocator.candidates import candidates
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan, side_by_side
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.cli.plan_choice import choose_plans, why_plan_cannot_run
from flowtrain_lightning.placement.measured import MeasuredCosts

PER_NODE = 8

UNSHARDED, RECOMMENDED, SYNCHRONOUS = "uniform, unsharded", "`flowtrain plan`", "batch-synchronous"

KINDS = (UNSHARDED, "uniform", "colocated", "separate", "mixed", RECOMMENDED, SYNCHRONOUS)
"""What is run: the fastest plan of every kind; of uniform ones also the fastest whose weights are whole on data ranks,
as Megatron-LM keeps them; what `flowtrain plan` recommends; and the fastest plan whose backbone waits until all of a
step is encoded, and whose encoders do not work ahead."""

_RUN = SearchSpace(pipeline=(1,), shard=("replicate", "fsdp"))
_AS_MEGATRON = SearchSpace(pipeline=(1,), context=(1,), shard=("replicate", "zero1"))


@dataclass(frozen=True)
class ExactCosts(ModelledCosts):
    """The planner's costs where they are the true ones, so that no faster plan is passed over for a plainer one."""

    margin: ClassVar[float] = 0.0


class SimulatedChoice:
    """A choice among plans by simulated steps, as that of a run among those that it predicts.

    Args:
        plans: among which, with what simulating them took as their seconds.
    """

    margin = MeasuredCosts.margin

    def __init__(self, plans: tuple[ModelledPlan, ...]) -> None:
        self._plans = plans

    def predictions(self) -> tuple[ModelledPlan, ...]:
        """The plans."""
        return self._plans


def choice_of_a_run(plans: Mapping[str, ModelledPlan], simulated: Mapping[str, float]) -> str:
    """The kind of plan that a run would take by itself, had it measured the costs that it is simulated with.

    Args:
        plans: kind -> plan, also of kinds among which a run does not choose.
        simulated: kind -> simulated seconds of a step.
    """
    told = (replace(plan, seconds=simulated[kind]) for kind, plan in plans.items() if kind == plan.kind)
    return choose_placement(SimulatedChoice(tuple(told))).chosen.kind


def best_plans(problems: Problems) -> dict[str, ModelledPlan]:
    """What is to be run: kind -> its plan, see ``KINDS``."""
    fastest = choose_plans(ExactCosts(problems, _RUN)).recommended.predictions
    plans: dict[str, ModelledPlan] = {plan.kind: plan for plan in fastest}
    recommended = choose_plans(ModelledCosts(problems)).recommended.chosen
    unsharded = (plan for plan in ExactCosts(problems, _AS_MEGATRON).plans() if plan.kind == "uniform")
    others = {UNSHARDED: next(unsharded, None), RECOMMENDED: recommended, SYNCHRONOUS: _synchronous_plan(problems)}
    return plans | {kind: plan for kind, plan in others.items() if plan is not None}


def _synchronous_plan(problems: Problems) -> ModelledPlan | None:
    """Roles on ranks of their own, so that encoding a step and then computing it take the least time together."""
    tables = {role: candidates(problem, _RUN) for role, problem in problems.items()}
    devices = problems.cluster.devices
    found = []
    for encoding in range(1, devices):
        split = {role: tables[role].on(count) for role, count in ((ENCODER, encoding), (BACKBONE, devices - encoding))}
        if all(map(len, split.values())):
            chosen = {role: table.candidate(int(table.seconds.argmin())) for role, table in split.items()}
            seconds = sum(one.seconds for one in chosen.values())
            found.append(replace(side_by_side(problems, chosen), seconds=seconds))
    runs = (plan for plan in found if why_plan_cannot_run(plan, problems) is None)
    return min(runs, key=lambda plan: plan.seconds, default=None)


def describe(plan: ModelledPlan) -> str:
    """The plan's layouts, and what they compute again."""
    allocation = plan.allocation(PER_NODE)
    again = [f"the {role} recomputes ({what})" for role, what in allocation.recompute.items() if what != "none"]
    return "; ".join([allocation.describe(), *again])
