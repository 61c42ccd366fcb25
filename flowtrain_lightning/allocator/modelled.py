"""Costs from a model of the devices: what plans of every kind take, and what fits at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np

from flowtrain_lightning.allocator.candidates import CandidateTable, SearchSpace, candidates, usable_bytes
from flowtrain_lightning.allocator.devices import Cluster
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.placements import (
    Tables,
    colocated_plan,
    mixed_plan,
    separate_plans,
    uniform_plan,
)
from flowtrain_lightning.allocator.planner import PLAN_KINDS, NoPlanError, PlanKind
from flowtrain_lightning.allocator.role_layout import Layout
from flowtrain_lightning.allocator.role_problem import Family, Problems

MOST_DEVICES = 2**16
"""More are neither planned for nor asked for."""


@dataclass(frozen=True)
class ModelledCosts:
    """Predicts the best plan of every kind by the models of time and memory.

    Attributes:
        problems: role -> what is planned for, see `role_problems`.
        space: which layouts may be used at all.
    """

    margin: ClassVar[float] = 0.10
    """Plans of one module share most of what is wrong with their times, so that gains are known better than times: of
    19 gains above a tenth that ``benchmarks/published.py`` predicts 18 are gains in print too, but 22 of 27 below."""

    problems: Problems
    space: SearchSpace = field(default_factory=SearchSpace)
    _found: dict[str, CandidateTable] = field(default_factory=dict, init=False, repr=False, compare=False)

    def predictions(self) -> tuple[ModelledPlan, ...]:
        """The best plan of every kind that fits, the simplest first.

        Raises:
            NoPlanError: no layout fits; says how many devices would do.
        """
        if not (found := self.every_plan):
            smallest = self.smallest_cluster()
            more = f"the smallest number that would do is {smallest}" if smallest else "nor would any number of them do"
            raise NoPlanError(f"{self.why_nothing_fits}; {more}.")
        return found

    @cached_property
    def every_plan(self) -> tuple[ModelledPlan, ...]:
        """The same, and empty where no layout fits."""
        return self.plans()

    def fastest_alone(self, role: str, allows: Callable[[Layout], bool]) -> float:
        """Seconds of a role's part of a step on all devices, in the fastest layout that is allowed; inf where none."""
        devices = self._cluster.devices

        def on_all(family: Family) -> Family | None:
            data = family.data[family.data * family.replica == devices]
            return replace(family, data=data) if len(data) and allows(family.layout(-1)) else None

        table = candidates(self.problems[role], self.space, considered=on_all)
        return float(table.seconds.min(initial=np.inf))

    def plans(
        self,
        allows: Callable[[str, Layout], bool] = lambda role, layout: True,
        kinds: Sequence[PlanKind] = PLAN_KINDS,
        staged: Collection[str] = (Problems.trunk,),
        thrifty: bool = False,
    ) -> tuple[ModelledPlan, ...]:
        """The same, but of layouts that a role is allowed and of these kinds, and empty where none fits.

        Of every kind it is the plainest plan that comes within the margin of the fastest one of its kind, and of all
        kinds where that can be: with all devices before fewer, without tensor, context and pipeline ranks before with.

        Args:
            allows: whether a role may have a layout.
            kinds: of plans.
            staged: roles that may have stages where roles have layouts of their own.
            thrifty: also, behind these, plans of the same kinds that are no slower on fewer nodes, or on half of one.
        """
        every = {role: self.allowed(role, allows) for role in self.problems}
        if len(every) == 1:
            alone = [plan for plan in self._sharing(uniform_plan, every) if plan is not None]
            enough = (1 + self.margin) * min((plan.seconds for plan in alone), default=0.0)
            return (thriftiest(self._plainest(alone, enough), alone, self._cluster.per_node),) if alone else ()
        whole = {role: table.of_families(_has_no_stages) for role, table in every.items() if role not in staged}
        apart = {**every, **whole}
        plain = _of_whole_layers(apart)

        def of_kind(kind: PlanKind) -> list[ModelledPlan | None]:
            if kind == "separate":
                full, lean = zip(*(separate_plans(self.problems, tables) for tables in (plain, apart)), strict=True)
                return [*full, *lean]
            if kind == "mixed":
                return [mixed_plan(self.problems, tables) for tables in (plain, apart)]
            if kind == "colocated":
                return self._sharing(colocated_plan, apart)
            return self._sharing(uniform_plan, every)

        every_kind = (of_kind(kind) for kind in PLAN_KINDS if kind in kinds)
        found = [[one for one in plans if one is not None and one.starts_on(self._cluster)] for plans in every_kind]
        # How far the roles of a mixed plan wait for each other only a simulation tells: it sets no mark for others.
        marks = [plan.seconds for plans in found for plan in plans if plan.kind != "mixed"]
        enough = (1 + self.margin) * min(marks, default=0.0)
        plainest = [self._plainest(plans, enough) for plans in found if plans]
        if thrifty:
            per_node = self._cluster.per_node
            others = [
                thriftiest(one, plans, per_node) for one, plans in zip(plainest, filter(None, found), strict=True)
            ]
            plainest += [other for other in others if not any(other is one for one in plainest)]
        return tuple(plainest)

    def allowed(self, role: str, allows: Callable[[str, Layout], bool]) -> CandidateTable:
        """The candidates of a role in layouts that it is allowed."""
        return self._table(role).of_layouts(partial(allows, role))

    def _sharing(
        self, best: Callable[[Problems, Tables], ModelledPlan | None], tables: Tables
    ) -> list[ModelledPlan | None]:
        """Plans of roles that share their devices, the plainest first; on any number of devices where else none is."""
        found = [best(self.problems, some) for some in self._plainest_first(tables)]
        return found if any(found) else [best(self.problems, tables)]

    def _plainest_first(self, tables: Tables) -> Iterator[Tables]:
        """Candidates for roles that share their devices: all of them, or else half, a quarter and so on."""
        devices = self._cluster.devices
        parts = 2.0 ** np.arange(1, 17)
        whole = {role: table.on(devices) for role, table in tables.items()}
        fewer = {role: table.select(np.isin(devices / table.devices, parts)) for role, table in tables.items()}
        for some in (whole, fewer):
            yield _of_whole_layers(some)
            yield some

    def _plainest(self, plans: Sequence[ModelledPlan], enough: float) -> ModelledPlan:
        """Of plans of one kind, the plainest first, the first one that is fast enough."""
        best = min(plan.seconds for plan in plans)
        wanted = (1 + self.margin) * best if best > enough else min(enough, (1 + self.margin) * best)
        return next(plan for plan in plans if plan.seconds <= wanted)

    def smallest_cluster(self) -> int | None:
        """The fewest devices on which something fits: whole nodes, or part of one; None up to 65,536."""
        cluster = self._cluster
        count = cluster.devices
        while count <= MOST_DEVICES and not self._fits_on(count):
            count = _next_size(cluster, count, 2 * count)
        if count > MOST_DEVICES:
            return None
        low, high = cluster.devices, count
        while (middle := _next_size(cluster, low, (low + high) // 2)) not in (low, high):
            low, high = (low, middle) if self._fits_on(middle) else (middle, high)
        return high

    @property
    def why_nothing_fits(self) -> str:
        """Says what does not fit, as the beginning of a sentence."""
        cluster = self._cluster
        devices = "1 device" if cluster.devices == 1 else f"{cluster.devices} devices"
        return (
            f"The module fits in no layout on {devices} {cluster.device.name} of "
            f"{usable_bytes(cluster) / 1e9:.0f} GB that can be planned for"
        )

    @property
    def _cluster(self) -> Cluster:
        return self.problems.cluster

    def _table(self, role: str) -> CandidateTable:
        """The candidates of a role, also in stages."""
        if role not in self._found:
            self._found[role] = candidates(self.problems[role], self.space, as_backbone=True)
        return self._found[role]

    def _fits_on(self, devices: int) -> bool:
        return bool(replace(self, problems=self.problems.on(replace(self._cluster, devices=devices))).plans())


def thriftiest(plan: ModelledPlan, others: Sequence[ModelledPlan], per_node: int) -> ModelledPlan:
    """The plan, or one on fewer nodes, or within a node on half of the devices, that is no slower."""
    rented = plan.rented(per_node)
    better = [one for one in others if one.seconds <= plan.seconds and one.rented(per_node) < rented]
    return thriftiest(min(better, key=lambda one: one.seconds), others, per_node) if better else plan


def _of_whole_layers(tables: Tables) -> Tables:
    """The candidates in which a device computes all layers on whole sequences."""
    return {role: table.of_families(lambda family: family.replica == 1) for role, table in tables.items()}


def _has_no_stages(family: Family) -> bool:
    return family.pipeline == 1


def _next_size(cluster: Cluster, least: int, count: int) -> int:
    """``count``, or what is a little less, so that nodes are whole; but above ``least``."""
    if count <= cluster.per_node:
        return count
    step = cluster.per_node
    return max(count // step * step, (least // step + 1) * step)
