"""Which plan to show first: the best one that training runs, and beside it what it does not run yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flowtrain_lightning.allocator import (
    BACKBONE,
    ENCODER,
    ROLES,
    Allocation,
    AllocationError,
    Layout,
    ModelledCosts,
    NoPlanError,
    PlacementChoice,
    choose_placement,
)
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan, Problems
from flowtrain_lightning.placement.request import why_it_cannot_run

_RUN = ("bf16-mixed", "bf16-true", "32-true")
"""Precisions that can be planned for and run."""


@dataclass(frozen=True)
class Choices:
    """The recommended plan, and the one that would be if training ran every layout.

    Attributes:
        recommended: of the plans that training runs, or of all where it runs none.
        anyway: of all plans.
    """

    recommended: PlacementChoice[ModelledPlan]
    anyway: PlacementChoice[ModelledPlan]


@dataclass(frozen=True)
class _RunnableCosts:
    """The predictions of modelled costs for what training runs."""

    costs: ModelledCosts

    margin: ClassVar[float] = ModelledCosts.margin

    def predictions(self) -> tuple[ModelledPlan, ...]:
        problems = self.costs.problems
        plans = self.costs.plans(lambda layout: _runs(layout) and _suits(layout, problems) is None)
        runs = [plan for plan in plans if why_plan_cannot_run(plan, problems) is None]
        if not runs:
            raise NoPlanError("Training runs none of the plans that fit.")
        return tuple(runs)


def choose_plans(costs: ModelledCosts) -> Choices:
    """The plans to show.

    Raises:
        NoPlanError: nothing fits at all.
    """
    anyway = choose_placement(costs)
    try:
        return Choices(choose_placement(_RunnableCosts(costs)), anyway)
    except NoPlanError:
        return Choices(anyway, anyway)


def why_plan_cannot_run(plan: ModelledPlan, problems: Problems) -> str | None:
    """What of a plan training does not offer today, as the end of a sentence about it; None where it runs."""
    backbone = problems[BACKBONE]
    if backbone.precision.name not in _RUN:
        return f"is for precision {backbone.precision.name!r}, but today a Trainer takes {', '.join(_RUN)}."
    try:
        allocation = plan.allocation(backbone.cluster.per_node)
    except AllocationError as error:
        return f"cannot be put onto ranks. {error}"
    reasons = (_suits(allocation.layouts[role], {role: problems[role]}) for role in allocation.layouts)
    return why_it_cannot_run(allocation) or next(filter(None, reasons), None)


def _suits(layout: Layout, problems: Problems) -> str | None:
    """Why none of these roles can have a layout, as the end of a sentence; None where all can."""
    if layout.tensor > 1 and any(part.experts is not None for each in problems.values() for part in each.half.layers):
        return "shares a mixture of experts among tensor ranks, which no run does today."
    backbone = problems.get(BACKBONE)
    waits = backbone is not None and backbone.receives_gradient and not backbone.half.trains
    if layout.gathers_weights and waits:
        return "shards a backbone that is frozen beside an encoder that trains, which is refused."
    return None


def _runs(layout: Layout) -> bool:
    """Whether training runs a layout at all: the backbone in it, at the smallest size of its kind."""
    replicas = min(2, layout.replicas)
    each = max(layout.expert, min(2, layout.data // layout.replicas))
    small = replace(layout, data=replicas * each, replicas=replicas)
    ranks = tuple(range(small.ranks))
    layouts = {ENCODER: Layout(small.ranks), BACKBONE: small}
    return why_it_cannot_run(Allocation("colocated", layouts, dict.fromkeys(ROLES, ranks))) is None
