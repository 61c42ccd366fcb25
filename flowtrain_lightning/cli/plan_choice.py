"""Chooses the plan to show first: the best one that training runs, and beside it what it does not run yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil, inf, lcm
from types import MappingProxyType
from typing import ClassVar, get_args

from flowtrain_lightning.allocator import (
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
from flowtrain_lightning.allocator.modelled import thriftiest
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan, given_plan, plan_from, side_by_side
from flowtrain_lightning.allocator.placements import least_seconds
from flowtrain_lightning.allocator.planner import PlanKind
from flowtrain_lightning.allocator.role_problem import Problems, RoleProblem, family_of
from flowtrain_lightning.allocator.role_time import batches
from flowtrain_lightning.packing.stage_schedule import Cut, Schedule
from flowtrain_lightning.placement.request import why_it_cannot_run
from flowtrain_lightning.placement.simulated_plans import PlanSimulator

_OF_STAGES: tuple[Placement, ...] = ("separate", "colocated")
"""Placements in which roles may have stages."""

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
    modelled = running_plans(costs) if running is None else list(running)
    if not modelled:
        return Choices(choose_placement(costs), None)
    played = modelled if simulator is None else simulator.simulated(modelled)
    per_node = costs.problems.cluster.per_node
    kinds = _one_of_each_kind(list(zip(modelled, played, strict=True)), costs.margin, per_node)
    both = [(before, as_loaded(after)) for before, after in kinds]
    recommended = choose_placement(_GivenPlans(tuple(after for _, after in both)))
    chosen = thriftiest(recommended.chosen, recommended.predictions, per_node)
    recommended = replace(recommended, chosen=chosen)
    before = next(before for before, after in both if after is recommended.chosen)
    others = [plan for plan in costs.every_plan if why_plan_cannot_run(plan, costs.problems) is not None]
    return Choices(recommended, _faster(others, before, recommended.chosen, as_loaded))


def _one_of_each_kind(
    plans: Sequence[tuple[ModelledPlan, ModelledPlan]], margin: float, per_node: int
) -> list[tuple[ModelledPlan, ModelledPlan]]:
    """Of plans as modelled and as played one of each kind: with stages where it is faster by more than the margin.

    The first one of a kind gives way to a later one on fewer nodes, or on half of one, that is no slower as played.
    So are encoders' stages, beside those of the backbone alone, and split backwards, beside whole ones. Of plans in
    stages that are as plain it is the fastest.
    How long stages wait for each other only playing them tells: those that were not played are left out, if others run.
    """
    plain: dict[PlanKind, tuple[ModelledPlan, ModelledPlan]] = {}
    for before, after in (each for each in plans if not has_stages(each[0])):
        first = plain.get(before.kind, (before, after))
        plain[before.kind] = first if thriftiest(first[1], [after], per_node) is first[1] else (before, after)
    staged = [(before, after) for before, after in plans if has_stages(before)]
    if any(after is not before for before, after in staged) or plain:
        staged = [(before, after) for before, after in staged if after is not before]
    fastest: dict[tuple[tuple[bool, bool], PlanKind], tuple[ModelledPlan, ModelledPlan]] = {}
    for before, after in sorted(staged, key=lambda each: each[1].seconds):
        fastest.setdefault((_less_plain(before), before.kind), (before, after))
    for before, after in (fastest[alike] for alike in sorted(fastest)):
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
    found = costs.plans(allows or (lambda role, layout: can_run(role, layout, problems)), thrifty=True)
    if (
        len(problems) > 2 and allows is None
    ):  # several encoders: what each role may have where all share ranks is less than where none do
        apart = costs.plans(lambda role, layout: can_run(role, layout, problems, "separate"), thrifty=True)
        found = (
            *(plan for plan in found if plan.kind != "separate"),
            *(one for one in apart if one.kind == "separate"),
        )
    run = [plan for plan in found if why_plan_cannot_run(plan, problems) is None]
    if allows is not None or len(problems) == 1:
        return run
    best = {plan.kind: plan.seconds for plan in reversed(run)}  # that stages wait for each other only makes them slower
    faster = (plan for plan in staged_plans(costs) if plan.seconds < best.get(plan.kind, inf))
    run += [plan for plan in faster if why_plan_cannot_run(plan, problems) is None]
    for plan in run:
        best[plan.kind] = min(best.get(plan.kind, inf), plan.seconds)
    return [*run, *(plan for plan in encoders_in_stages(costs, best) if why_plan_cannot_run(plan, problems) is None)]


def staged_plans(costs: ModelledCosts) -> Iterator[ModelledPlan]:
    """The best plan of every number and cut of stages, separate and colocated; then with split backwards.

    Cut by time stages are faster, but the first one is fuller: by number counts where that allows another plan.
    """
    problems = costs.problems
    for count, placement in product(costs.space.pipeline, _OF_STAGES):
        found: list[ModelledPlan] = []
        for cut in get_args(Cut) if count > 1 else ():
            allowed = _allowed_in({problems.trunk: count}, placement, problems, cut)
            for plan in costs.plans(allowed, (placement,)):
                every = (plan, *_with_split_backwards(plan, problems))
                found += [one for one in every if not any(_are_alike_but_for_the_cut(one, each) for each in found)]
        yield from found


def _are_alike_but_for_the_cut(one: ModelledPlan, other: ModelledPlan) -> bool:
    """Whether two plans in stages have the same layouts, and compute and move the same again."""
    mine, others = (
        {role: (replace(each.layout, cut="time"), each.recompute, each.offload) for role, each in plan.chosen.items()}
        for plan in (one, other)
    )
    return mine == others


def encoders_in_stages(costs: ModelledCosts, best: Mapping[PlanKind, float]) -> Iterator[ModelledPlan]:
    """The most promising plan in which an encoder has stages, alone or with the backbone, separate and colocated.

    Args:
        costs: predict the plans.
        best: kind -> seconds of the best plan whose encoders have none. What is not faster than it by more than the
            margin is left out.
    """
    problems, trunk = costs.problems, costs.problems.trunk
    roles = [role for role in problems.encoders if problems[role].half.levels == 1]
    counts = [count for count in costs.space.pipeline if count > 1]
    for placement in _OF_STAGES:
        enough, found = best.get(placement, inf) / (1 + costs.margin), list[ModelledPlan]()
        tables = {
            (role, count): costs.allowed(role, _allowed_in({role: count}, placement, problems))
            for role, count in product(problems, (1, *counts) if roles else ())
        }
        for role, count, both in product(roles, counts, (False, True)):
            stages = {role: count, trunk: count if both else 1}
            some = {each: tables[each, stages.get(each, 1)] for each in problems}
            if least_seconds(problems, some, placement) < enough:
                found += costs.plans(_allowed_in(stages, placement, problems), (placement,), staged=stages)
        filled = min((_as_filled(plan, problems) for plan in found), key=lambda plan: plan.seconds, default=None)
        if filled is not None and filled.seconds < enough:
            yield filled


def _as_filled(plan: ModelledPlan, problems: Problems) -> ModelledPlan:
    """A plan whose encoders have no more batches than the backbone has microbatches, or than their media fill.

    The model takes each role to have as many as its stages want.
    """
    trunk, chosen, longer = plan.chosen[problems.trunk], dict(plan.chosen), 0.0
    positions = float(batches(problems.of_trunk, family_of(trunk.layout))[0][0])
    for role in problems.encoders:
        one, problem = chosen[role], problems[role]
        data, stages = one.layout.data, one.layout.pipeline
        wanted = float(batches(problem, family_of(one.layout))[0][0])
        there = max(ceil(problem.full_batches / data), min(positions, max(1.0, problem.load.items // data)))
        batch = one.batch_seconds * max(1.0, wanted / there)
        more = (stages - 1) * (batch - one.batch_seconds)
        chosen[role], longer = replace(one, seconds=one.seconds + more, batch_seconds=batch), longer + more
    if plan.kind == "separate":
        return side_by_side(problems, chosen)
    return plan_from(plan.kind, problems, chosen, seconds=plan.seconds + longer)


def _allowed_in(
    stages: Mapping[str, int], placement: Placement, problems: Problems, cut: Cut = "time"
) -> Callable[[str, Layout], bool]:
    """Whether a role may have a layout, in a placement, where some roles have so many stages, the trunk's cut so."""

    def allowed(role: str, layout: Layout) -> bool:
        return can_run(role, layout, problems, placement, stages) and (role != problems.trunk or layout.cut == cut)

    return allowed


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


def _less_plain(plan: ModelledPlan) -> tuple[bool, bool]:
    """Whether another role than the backbone has stages, and whether stages split backwards."""
    layouts = {role: one.layout for role, one in plan.chosen.items()}
    splits = any(layout.stages.splits for layout in layouts.values())
    return any(layout.pipeline > 1 for role, layout in layouts.items() if role != Problems.trunk), splits


def can_run(
    role: str,
    layout: Layout,
    problems: Problems,
    placement: Placement = "colocated",
    stages: Mapping[str, int] = MappingProxyType({}),
) -> bool:
    """Whether training runs a role in a layout, in a placement, where some roles have so many stages."""
    if layout.pipeline != stages.get(role, 1):
        return False
    degrees = tuple((name, stages.get(name, 1)) for name in problems)
    if not _runs(role, layout, degrees, placement):
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
    for role, layout in allocation.layouts.items():
        if role in problems.encoders and layout.pipeline > 1 and problems[role].half.levels > 1:
            return f"has stages of the {role}, whose features leave it behind several layers of unlike stages."
    reasons = (_suits(layout, problems[role]) for role, layout in allocation.layouts.items())
    return why_it_cannot_run(allocation) or next(filter(None, reasons), None)


def _suits(layout: Layout, problem: RoleProblem) -> str | None:
    """Why a role cannot have a layout, as the end of a sentence; None where it can."""
    in_shared_stages = layout.tensor > 1 and layout.pipeline > 1
    if in_shared_stages and any(part.experts is not None for part in problem.half.layers):
        return "shares a mixture of experts among tensor ranks of a stage, which no run does today."
    waits = problem.role == Problems.trunk and problem.receives_gradient and not problem.half.trains
    if layout.meets_in_forwards and waits:
        return "divides a backbone that is frozen beside an encoder that trains, which is refused."
    return None


def _why_text_cannot_run(layout: Layout) -> str | None:
    """The same of a language model, which Lightning's own strategies train: there is no encoder to place."""
    if layout.shard in ("replicate", "fsdp") and layout.ranks_of_member == layout.expert == 1:
        return None
    return (
        f"has no encoder, so that Lightning's own strategies train it, and these have no layout {layout.describe()} "
        "without code of yours."
    )


@cache
def _runs(role: str, layout: Layout, stages: tuple[tuple[str, int], ...], placement: Placement) -> bool:
    """Whether training runs a layout at all: the role in it, at the smallest size of its kind, others in copies.

    Each role is in so many stages.
    """
    degrees = dict(stages)
    if len(degrees) == 1:
        return _why_text_cannot_run(layout) is None
    replicas = min(2, layout.replicas)
    each = max(layout.expert, min(2, layout.data // layout.replicas))
    small = replace(layout, data=replicas * each * lcm(*degrees.values()) // degrees[role], replicas=replicas)
    together, count = placement == "colocated", small.ranks
    order = sorted(degrees, key=lambda name: name != Problems.trunk)
    first = {name: 0 if together else number * count for number, name in enumerate(order)}
    ranks = {name: tuple(range(first[name], first[name] + count)) for name in degrees}
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
