"""Steps of a plan, simulated with measured or modelled costs: what they take, and where the time of its ranks goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.packing import DEFAULT_COST, CostModel, IntArray, SampleSizes, StepPlan
from flowtrain_lightning.packing.encoder_batches import ENCODER_BUDGET
from flowtrain_lightning.packing.simulator import SimulatedSpan, simulate_steps
from flowtrain_lightning.packing.stage_entries import part_names
from flowtrain_lightning.packing.step_plan import Batches
from flowtrain_lightning.packing.step_planner import plan_step, sync_every_of
from flowtrain_lightning.packing.step_work import StepWork
from flowtrain_lightning.placement.lane_work import lane_work
from flowtrain_lightning.placement.layout_costs import LayoutCosts

PURPOSES = ("forward", "backward", "reduction", "optimizer", "idle")
"""Purposes of a rank's time. A forward that is computed again is part of the backward, and gathering weights and
scattering gradients part of the pass that waits for it."""


@dataclass(frozen=True)
class Activity:
    """A piece of work of one rank.

    Attributes:
        rank: who.
        role: for which role.
        name: ``"forward"``, ``"backward"``, ``"reduction"`` (of gradients) or ``"optimizer"``.
        step: which of the steps; 0 is the one that does not count.
        number: of the batch in its lane.
        start: seconds since the first step began.
        end: seconds since the first step began.
    """

    rank: int
    role: str
    name: str
    step: int
    number: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Consecutive steps, after one that does not count since nothing comes before it.

    Attributes:
        allocation: which ranks do what.
        seconds: of every step, from the end of the backbone's step before to that of its own.
        samples: of a step, on average.
        tokens: of a step, on average.
        shares: role -> purpose -> the part of its ranks' time, from 0 to 1. A rank with two roles is idle where it
            computes for neither, so that the shares of both, with idle counted once, make 1.
        activities: all that ranks do.
    """

    allocation: Allocation
    seconds: list[float]
    samples: float
    tokens: float
    shares: Mapping[str, Mapping[str, float]]
    activities: tuple[Activity, ...]

    @property
    def step_seconds(self) -> float:
        """Of a step, on average."""
        return float(np.mean(self.seconds))

    def waiting_for(self, seconds: float) -> Simulation:
        """The same steps where each waits for something that takes so long, on average, beside all that ranks do."""
        times = max(1.0, seconds / self.step_seconds)
        shares = {
            role: {name: share / times + (name == "idle") * (1 - 1 / times) for name, share in of_role.items()}
            for role, of_role in self.shares.items()
        }
        return replace(self, seconds=[times * each for each in self.seconds], shares=shares)


def plan_on(
    allocation: Allocation,
    sizes: SampleSizes,
    samples: IntArray,
    token_budget: int,
    cost: CostModel = DEFAULT_COST,
    media_costs: Mapping[str, CostModel] | None = None,
    encoder_budget: int = ENCODER_BUDGET,
    microbatches: Batches | None = None,
) -> StepPlan:
    """The plan of a step as the Trainer would make it on the allocation's ranks.

    Args:
        allocation: of all roles.
        sizes: the sizes of ``samples``.
        samples: ``[n]`` indices into the data set.
        token_budget: the most tokens of a microbatch.
        cost: by which microbatches are balanced.
        media_costs: by which batches of media items are, see `plan_step`.
        encoder_budget: the most patches of an encoder batch.
        microbatches: of a step that fills them; None packs as many as are needed.

    Raises:
        PackingError: samples do not fit into microbatches, or there are none.
    """
    members = allocation.step_members()
    return plan_step(
        sizes,
        samples,
        members,
        token_budget=token_budget,
        encoder_budget=encoder_budget,
        cost=cost,
        media_costs=media_costs,
        sync_every=sync_every_of(members),
        microbatches=microbatches,
    )


def simulate(plans: Sequence[StepPlan], allocation: Allocation, costs: LayoutCosts, kept_batches: int) -> Simulation:
    """Simulate steps on an allocation by the rules of the runtime, every rank on a device of its own.

    Moving features, loading and Lightning's own work take no time here; hidden states take theirs to the next stage.

    Args:
        plans: consecutive steps, planned for the allocation. The first one is simulated twice.
        allocation: which ranks do what.
        costs: what everything takes on it.
        kept_batches: encoder batches whose activations each encoder rank keeps.
    """
    plans = [plans[0], *plans]
    works, rules = lane_work(plans, allocation, costs, kept_batches)
    simulated = simulate_steps(works, rules)
    ends = simulated.step_ends
    activities = tuple(_activities(simulated.spans, works, allocation, costs))
    counted = plans[1:]
    return Simulation(
        allocation=allocation,
        seconds=np.diff(ends).tolist(),
        samples=float(np.mean([len(plan.samples) for plan in counted])),
        tokens=float(np.mean([plan.sizes.tokens.sum() for plan in counted])),
        shares=_shares(activities, allocation, (ends[0], ends[-1])),
        activities=activities,
    )


def _activities(
    spans: Sequence[SimulatedSpan], works: Sequence[StepWork], allocation: Allocation, costs: LayoutCosts
) -> Iterator[Activity]:
    """A simulated step, with its end told apart from its batches."""
    ends = {name: costs.end_of_step(name) for name in works[0]}
    layouts = allocation.layouts.items()
    role_of = {name: role for role, layout in layouts for name in part_names(role, layout.stages)}
    for span in spans:
        (name, member, number), kind = span.work
        role = role_of[name]
        start, seconds = span.start, span.end - span.start
        parts: list[tuple[str, float]] = [(kind, seconds)]
        batches = works[span.step][name][member]
        # All there is of what is no batch, or the last backward of what ends with one.
        if batches[number].closes or (number == len(batches) - 1 and kind == "backward"):
            reduction, optimizer = ends[name]
            own = max(0.0, seconds - reduction - optimizer)
            parts = [(kind, own), ("reduction", reduction), ("optimizer", optimizer)]
        for part, seconds in parts:
            if seconds > 0:
                yield Activity(span.rank, role, part, span.step, number, start, start + seconds)
            start += seconds


def _shares(
    activities: Sequence[Activity], allocation: Allocation, window: tuple[float, float]
) -> dict[str, dict[str, float]]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    busy: dict[int, float] = defaultdict(float)
    for one in activities:
        spent = max(0.0, min(one.end, window[1]) - max(one.start, window[0]))
        busy[one.rank] += spent
        seconds[one.role, one.name] += spent
    shares = {}
    for role, ranks in allocation.ranks.items():
        whole = len(ranks) * (window[1] - window[0])
        idle = whole - sum(busy[rank] for rank in ranks)
        spent_on = {**{name: seconds[role, name] for name in PURPOSES}, "idle": max(0.0, idle)}
        shares[role] = {name: spent / whole for name, spent in spent_on.items()}
    return shares
