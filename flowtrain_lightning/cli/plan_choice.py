"""Which plan to show first: the best one that training runs, and beside it what it does not run yet."""

from __future__ import annotations

from collections.abc import Sequence
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
    PlacementChoice,
    choose_placement,
)
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan, Problems
from flowtrain_lightning.placement.request import why_it_cannot_run
from flowtrain_lightning.placement.simulated_plans import PlanSimulator

_RUN = ("bf16-mixed", "bf16-true", "32-true")
"""Precisions that can be planned for and run."""


@dataclass(frozen=True)
class Choices:
    """The recommended plan, and what would be faster if training ran every layout.

    Attributes:
        recommended: of the plans that training runs, or of all where it runs none.
        faster: the best plan of all where it is faster and training does not run it yet. Nothing simulates it, so
            it is taken to fall short of its model as the recommended one does.
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
    costs: ModelledCosts, simulator: PlanSimulator | None = None, running: Sequence[ModelledPlan] | None = None
) -> Choices:
    """The plans to show.

    Args:
        costs: predict the best plan of every kind.
        simulator: plays these, so that the choice is by what a packed step takes; None takes them as modelled.
        running: what `running_plans` gives, if it is known.

    Raises:
        NoPlanError: nothing fits at all.
    """
    anyway = choose_placement(costs)
    modelled = running_plans(costs) if running is None else list(running)
    if not modelled:
        return Choices(anyway, None)
    played = tuple(modelled if simulator is None else simulator.simulated(modelled))
    recommended = choose_placement(_GivenPlans(played))
    before = next(plan for plan in modelled if plan.kind == recommended.chosen.kind)
    return Choices(recommended, _faster(anyway.chosen, before, recommended.chosen))


def running_plans(costs: ModelledCosts) -> list[ModelledPlan]:
    """The best plan of every kind among those that training runs."""
    problems = costs.problems
    plans = costs.plans(lambda layout: can_run(layout, problems))
    return [plan for plan in plans if why_plan_cannot_run(plan, problems) is None]


def can_run(layout: Layout, problems: Problems) -> bool:
    """Whether training runs the backbone in a layout, in some placement."""
    return _runs(layout, len(problems) - 1) and _suits(layout, problems) is None


def _faster(best: ModelledPlan, modelled: ModelledPlan, recommended: ModelledPlan) -> ModelledPlan | None:
    """The best plan of all, slowed as the recommended one is by being simulated; None where it is not faster."""
    if best.seconds >= modelled.seconds:
        return None
    slower = recommended.seconds / modelled.seconds
    return replace(
        best,
        seconds=best.seconds * slower,
        samples_per_second=best.samples_per_second / slower,
        waiting=best.waiting * slower,
        mfu=best.mfu / slower,
    )


def why_plan_cannot_run(plan: ModelledPlan, problems: Problems) -> str | None:
    """What of a plan training does not offer today, as the end of a sentence about it; None where it runs."""
    backbone = problems[BACKBONE]
    if backbone.precision.name not in _RUN:
        return f"is for precision {backbone.precision.name!r}, but today a Trainer takes {', '.join(_RUN)}."
    if backbone.precision.host_states:
        return (
            "keeps the optimizer's states alone in the host's memory, which training does only where DeepSpeed runs a "
            "role: give a layout with shard 'deepspeed-1', 'deepspeed-2' or 'deepspeed-3' and offload 'optimizer', or "
            "with shard 'fsdp' and offload 'weights', as --layout."
        )
    if len(problems) == 1:
        return _why_text_cannot_run(plan.chosen[BACKBONE].layout)
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


def _why_text_cannot_run(layout: Layout) -> str | None:
    """The same of a language model, which Lightning's own strategies train: there is no encoder to place."""
    if layout.shard in ("replicate", "fsdp") and layout.tensor == layout.pipeline == layout.context == 1:
        return None
    return (
        f"has no encoder, so that Lightning's own strategies train it, and these have no layout {layout.describe()} "
        "without code of yours."
    )


def _runs(layout: Layout, encoders: int) -> bool:
    """Whether training runs a layout at all: the backbone in it, at the smallest size of its kind."""
    if encoders == 0:
        return _why_text_cannot_run(layout) is None
    replicas = min(2, layout.replicas)
    each = max(layout.expert, min(2, layout.data // layout.replicas))
    small = replace(layout, data=replicas * each, replicas=replicas)
    if encoders > 1:
        return why_it_cannot_run(_beside_several_encoders(small, encoders)) is None
    ranks = tuple(range(small.ranks))
    layouts = {ENCODER: Layout(small.ranks), BACKBONE: small}
    return why_it_cannot_run(Allocation("colocated", layouts, dict.fromkeys(ROLES, ranks))) is None


def _beside_several_encoders(backbone: Layout, encoders: int) -> Allocation:
    """A backbone in a layout, with encoders of one rank each."""
    names = [f"{ENCODER}_{number}" for number in range(encoders)]
    ranks = {name: (backbone.ranks + number,) for number, name in enumerate(names)}
    layouts = {**dict.fromkeys(names, Layout()), BACKBONE: backbone}
    return Allocation("separate", layouts, {**ranks, BACKBONE: tuple(range(backbone.ranks))})


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
