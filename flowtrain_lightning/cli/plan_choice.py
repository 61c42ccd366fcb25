"""Chooses the plan to show first: the best one that training runs, and beside it what it does not run yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import ClassVar

from flowtrain_lightning.allocator import (
    BACKBONE,
    Allocation,
    AllocationError,
    Layout,
    ModelledCosts,
    Placement,
    PlacementChoice,
    PlanningError,
    choose_placement,
)
from flowtrain_lightning.allocator.candidates import usable_bytes
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan, given_plan
from flowtrain_lightning.allocator.role_problem import Problems, RoleProblem
from flowtrain_lightning.packing.stage_schedule import Schedule
from flowtrain_lightning.placement.request import why_it_cannot_run
from flowtrain_lightning.placement.simulated_plans import PlanSimulator

_OF_STAGES: tuple[Placement, ...] = ("separate", "colocated")
"""Placements in which a backbone may have stages."""

_SPLIT: tuple[Schedule, ...] = ("zb-h1", "zb-v")
"""Orders of stages whose backwards are in two parts; tried with the layouts that are best with whole ones."""

_RUN = ("bf16-mixed", "bf16-true", "32-true")
"""Precisions that can be planned for and run."""


@dataclass(frozen=True)
class Choices:
    """The recommended plan, and what would be faster if training ran every layout.

    Attributes:
        recommended: of the plans that training runs, or of all where it runs none.
        faster: the fastest plan that training does not run yet, where it is faster. Nothing simulates it, so it is
            taken to fall short of its model as the recommended one does.
    """

    recommended: PlacementChoice[ModelledPlan]
    faster: ModelledPlan | None


@dataclass(frozen=True)
class _GivenPlans:
    """Predictions that were made already."""

    plans: tuple[ModelledPlan, ...]

    margin: ClassVar[float] = ModelledCosts.margin

    def predictions(self) -> tuple[ModelledPlan, ...]:
        return self.plans


def choose_plans(
    costs: ModelledCosts,
    simulator: PlanSimulator | None = None,
    running: Sequence[ModelledPlan] | None = None,
    as_loaded: Callable[[ModelledPlan], ModelledPlan] = lambda plan: plan,
) -> Choices:
    """The plans to show.

    Args:
        costs: predict the best plan of every kind.
        simulator: plays these, so that the choice is by what a packed step takes; None takes them as modelled.
        running: what `running_plans` gives, if it is known.
        as_loaded: what hosts make of a plan, whose loaders may be slower than its steps.

    Raises:
        NoPlanError: nothing fits at all.
    """
    anyway = choose_placement(costs)
    modelled = running_plans(costs) if running is None else list(running)
    if not modelled:
        return Choices(anyway, None)
    played = modelled if simulator is None else simulator.simulated(modelled)
    kinds = _one_of_each_kind(list(zip(modelled, played, strict=True)), costs.margin)
    both = [(before, as_loaded(after)) for before, after in kinds]
    recommended = choose_placement(_GivenPlans(tuple(after for _, after in both)))
    before = next(before for before, after in both if after is recommended.chosen)
    others = [plan for plan in anyway.predictions if why_plan_cannot_run(plan, costs.problems) is not None]
    return Choices(recommended, _faster(others, before, recommended.chosen, as_loaded))


def _one_of_each_kind(
    plans: Sequence[tuple[ModelledPlan, ModelledPlan]], margin: float
) -> list[tuple[ModelledPlan, ModelledPlan]]:
    """Of plans as modelled and as played one of each kind: with stages where it is faster by more than the margin.

    So are split backwards, beside whole ones.
    How long stages wait for each other only playing them tells: those that were not played are left out, if others run.
    """
    plain = {before.kind: (before, after) for before, after in plans if not has_stages(before)}
    staged = [(before, after) for before, after in plans if has_stages(before)]
    if any(after is not before for before, after in staged) or plain:
        staged = [(before, after) for before, after in staged if after is not before]
    for before, after in sorted(staged, key=lambda each: (_splits(each[0]), -each[1].seconds)):
        if before.kind not in plain or after.seconds * (1 + margin) < plain[before.kind][1].seconds:
            plain[before.kind] = (before, after)
    return list(plain.values())


def running_plans(costs: ModelledCosts, allows: Callable[[str, Layout], bool] | None = None) -> list[ModelledPlan]:
    """The best plan of every kind among those that training runs; then those in stages, see `staged_plans`.

    Args:
        costs: predict the plans.
        allows: whether a role may have a layout, of those that it can run in; None: all of them, also in stages.
    """
    problems = costs.problems
    found = costs.plans(allows or (lambda role, layout: can_run(role, layout, problems)))
    if (
        len(problems) > 2 and allows is None
    ):  # several encoders: what each role may have where all share ranks is less than where none do
        apart = costs.plans(lambda role, layout: can_run(role, layout, problems, "separate"))
        found = (
            *(plan for plan in found if plan.kind != "separate"),
            *(one for one in apart if one.kind == "separate"),
        )
    run = [plan for plan in found if why_plan_cannot_run(plan, problems) is None]
    if allows is not None or len(problems) == 1:
        return run
    best = {plan.kind: plan.seconds for plan in run}  # that stages wait for each other only makes them slower
    staged = (plan for plan in staged_plans(costs) if plan.seconds < best.get(plan.kind, inf))
    return [*run, *(plan for plan in staged if why_plan_cannot_run(plan, problems) is None)]


def staged_plans(costs: ModelledCosts) -> Iterator[ModelledPlan]:
    """The best plan of every number of stages of the backbone, separate and colocated; then with split backwards."""
    problems = costs.problems
    for stages in costs.space.pipeline:
        for placement in _OF_STAGES if stages > 1 else ():

            def allows(role: str, layout: Layout, stages: int = stages, placement: Placement = placement) -> bool:
                return can_run(role, layout, problems, placement, stages)

            for plan in costs.plans(allows, (placement,)):
                yield plan
                yield from _with_split_backwards(plan, problems)


def _with_split_backwards(plan: ModelledPlan, problems: Problems) -> Iterator[ModelledPlan]:
    """A plan in stages, whose backwards are in two parts, where what is kept between these fits into memory.

    None with experts, which have nearly all weights, and make the gradients of these with the first part.
    """
    cluster = problems.cluster
    if any(part.experts is not None for part in problems.of_trunk.half.layers):
        return
    for schedule in _SPLIT:
        try:
            allocation = plan.allocation(cluster.per_node)
            split = replace(allocation.layouts[problems.trunk], schedule=schedule)
            found = given_plan(problems, replace(allocation, layouts={**allocation.layouts, problems.trunk: split}))
        except PlanningError:  # it leaves devices out, or has too few layers for two runs of them in a stage
            continue
        if found.peak_bytes <= usable_bytes(cluster):
            yield found


def has_stages(plan: ModelledPlan) -> bool:
    """Whether a role of the plan has stages."""
    return any(one.layout.pipeline > 1 for one in plan.chosen.values())


def _splits(plan: ModelledPlan) -> bool:
    return any(one.layout.stages.splits for one in plan.chosen.values())


def can_run(role: str, layout: Layout, problems: Problems, placement: Placement = "colocated", stages: int = 1) -> bool:
    """Whether training runs a role in a layout, in a placement, where the backbone has so many stages."""
    if layout.pipeline != _degree(role, stages) or not _runs(role, layout, tuple(problems), placement, stages):
        return False
    return all(_suits(layout, one) is None for one in problems.values())


def _faster(
    others: Sequence[ModelledPlan],
    modelled: ModelledPlan,
    recommended: ModelledPlan,
    as_loaded: Callable[[ModelledPlan], ModelledPlan],
) -> ModelledPlan | None:
    """The fastest of plans that do not run, slowed as the recommended one is by being simulated; None: it is no faster.

    Those that run are not among them, whatever their models say: they were played, and lost.
    """
    best = min(others, key=lambda each: each.seconds, default=modelled)
    if best.seconds >= modelled.seconds:
        return None
    simulated = recommended.seconds / recommended.held_up
    found = as_loaded(best.slowed(simulated / modelled.seconds))
    return found if found.seconds < recommended.seconds else None


def why_plan_cannot_run(plan: ModelledPlan, problems: Problems) -> str | None:
    """The part of a plan that training does not offer today, as the end of a sentence; None if the plan runs."""
    backbone = problems.of_trunk
    if backbone.precision.name not in _RUN:
        return f"is for precision {backbone.precision.name!r}, but today a Trainer takes {', '.join(_RUN)}."
    if backbone.precision.host_states:
        return (
            "keeps the optimizer's states alone in the host's memory, which training does only where DeepSpeed runs a "
            "role: give a layout with shard 'deepspeed-1', 'deepspeed-2' or 'deepspeed-3' and offload 'optimizer', or "
            "with shard 'fsdp' and offload 'weights', as --layout."
        )
    if len(problems) == 1:
        return _why_text_cannot_run(plan.chosen[problems.trunk].layout)
    try:
        allocation = plan.allocation(backbone.cluster.per_node)
    except AllocationError as error:
        return f"cannot be put onto ranks. {error}"
    reasons = (_suits(layout, problems[role]) for role, layout in allocation.layouts.items())
    return why_it_cannot_run(allocation) or next(filter(None, reasons), None)


def _suits(layout: Layout, problem: RoleProblem) -> str | None:
    """Why a role cannot have a layout, as the end of a sentence; None where it can."""
    has_experts = any(part.experts is not None for part in problem.half.layers)
    if layout.tensor > 1 and layout.pipeline > 1 and has_experts:
        return "shares a mixture of experts among tensor ranks of a stage, which no run does today."
    waits = problem.role == Problems.trunk and problem.receives_gradient and not problem.half.trains
    if layout.meets_in_forwards and waits:
        return "divides a backbone that is frozen beside an encoder that trains, which is refused."
    return None


def _why_text_cannot_run(layout: Layout) -> str | None:
    """The same of a language model, which Lightning's own strategies train: there is no encoder to place."""
    if layout.shard in ("replicate", "fsdp") and layout.tensor == layout.pipeline == layout.context == 1:
        return None
    return (
        f"has no encoder, so that Lightning's own strategies train it, and these have no layout {layout.describe()} "
        "without code of yours."
    )


def _degree(role: str, stages: int) -> int:
    """Stages of a role where the backbone has so many."""
    return {BACKBONE: stages}.get(role, 1)


@cache
def _runs(role: str, layout: Layout, roles: tuple[str, ...], placement: Placement, stages: int) -> bool:
    """Whether training runs a layout at all: the role in it, at the smallest size of its kind, others in copies.

    The backbone is in so many stages, of copies.
    """
    if len(roles) == 1:
        return _why_text_cannot_run(layout) is None
    replicas = min(2, layout.replicas)
    each = max(layout.expert, min(2, layout.data // layout.replicas))
    small = replace(layout, data=replicas * each * stages // _degree(role, stages), replicas=replicas)
    together, count = placement == "colocated", small.ranks
    order = (BACKBONE, *(name for name in roles if name != BACKBONE))
    first = {name: 0 if together else number * count for number, name in enumerate(order)}
    ranks = {name: tuple(range(first[name], first[name] + count)) for name in roles}
    degrees = {name: _degree(name, stages) for name in roles}
    copies = {name: Layout(count // degree, pipeline=degree) for name, degree in degrees.items()}
    layouts = copies | {role: small}
    return why_it_cannot_run(Allocation(placement, layouts, ranks)) is None


def kinds_alike(plans: Sequence[ModelledPlan]) -> list[tuple[ModelledPlan, tuple[str, ...]]]:
    """The plans that differ, each with the names of others that are the same layouts on the same devices."""
    found: list[tuple[ModelledPlan, tuple[str, ...]]] = []
    for plan in plans:
        same = next((place for place, (one, _) in enumerate(found) if one.is_laid_out_as(plan)), None)
        if same is None:
            found.append((plan, ()))
        else:
            found[same] = (found[same][0], (*found[same][1], plan.name))
    return found
