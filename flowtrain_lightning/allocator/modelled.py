"""Costs from a model of the devices: what plans of every kind take, and what fits at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from flowtrain_lightning.allocator.allocation import BACKBONE
from flowtrain_lightning.allocator.candidates import SearchSpace, candidates, usable_bytes
from flowtrain_lightning.allocator.devices import Cluster
from flowtrain_lightning.allocator.placements import (
    ModelledPlan,
    Problems,
    Tables,
    colocated_plan,
    mixed_plan,
    separate_plan,
    uniform_plan,
)
from flowtrain_lightning.allocator.planner import NoPlanError

_MOST_DEVICES = 2**16


@dataclass(frozen=True)
class ModelledCosts:
    """Predicts the best plan of every kind by the models of time and memory.

    Attributes:
        problems: role -> what is planned for, see `role_problems`.
        space: which layouts may be used at all.
    """

    margin: ClassVar[float] = 0.10
    """Plans of one module share most of what is wrong with their times, so that gains are known better than times: all
    17 gains above a tenth that ``benchmarks/published.py`` predicts are gains in print too, but not all below."""

    problems: Problems
    space: SearchSpace = field(default_factory=SearchSpace)

    def predictions(self) -> tuple[ModelledPlan, ...]:
        """The best plan of every kind that fits, the simplest first.

        Raises:
            NoPlanError: no layout fits; says how many devices would do.
        """
        if not (found := self.plans()):
            raise NoPlanError(self._refusal())
        return found

    def plans(self) -> tuple[ModelledPlan, ...]:
        """The same, but empty where no layout fits.

        Of every kind it is the plan without tensor, context and pipeline ranks, unless those make it faster by more
        than the margin, or are needed to come within the margin of the fastest kind.
        """
        kinds: tuple[Callable[[Tables, SearchSpace], ModelledPlan | None], ...] = (
            lambda tables, space: uniform_plan(self.problems, space),
            lambda tables, space: colocated_plan(self.problems, tables),
            lambda tables, space: separate_plan(self.problems, tables),
            lambda tables, space: mixed_plan(self.problems, tables),
        )
        every = self._tables()
        whole = {role: table.of_whole_layers for role, table in every.items()}
        simple = replace(self.space, tensor=(1,), pipeline=(1,), context=(1,))
        pairs = [(make(whole, simple), make(every, self.space)) for make in kinds]
        enough = (1 + self.margin) * min((best.seconds for _, best in pairs if best is not None), default=0.0)
        found = []
        for plain, best in pairs:
            if plain is not None and best is not None and plain.seconds <= best.seconds * (1 + self.margin):
                best = plain if plain.seconds <= enough or best.seconds > enough else best
            found += [] if best is None else [best]
        return tuple(found)

    def smallest_cluster(self) -> int | None:
        """The fewest devices on which something fits: whole nodes, or part of one; None up to 65,536."""
        cluster = self._cluster
        count = cluster.devices
        while count <= _MOST_DEVICES and not self._fits_on(count):
            count = _next_size(cluster, count, 2 * count)
        if count > _MOST_DEVICES:
            return None
        low, high = cluster.devices, count
        while (middle := _next_size(cluster, low, (low + high) // 2)) not in (low, high):
            low, high = (low, middle) if self._fits_on(middle) else (middle, high)
        return high

    @property
    def _cluster(self) -> Cluster:
        return self.problems[BACKBONE].cluster

    def _tables(self) -> Tables:
        return {role: candidates(problem, self.space) for role, problem in self.problems.items()}

    def _refusal(self) -> str:
        cluster = self._cluster
        devices = "1 device" if cluster.devices == 1 else f"{cluster.devices} devices"
        refusal = (
            f"The module fits in no layout on {devices} {cluster.device.name} of "
            f"{usable_bytes(cluster) / 1e9:.0f} GB that can be planned for"
        )
        smallest = self.smallest_cluster()
        if smallest is None:
            return (
                f"{refusal}, nor on any larger number up to {_MOST_DEVICES}; lower the token budget or freeze a half."
            )
        return f"{refusal}; the smallest number that would do is {smallest}."

    def _fits_on(self, devices: int) -> bool:
        cluster = replace(self._cluster, devices=devices)
        larger = replace(self, problems={role: replace(one, cluster=cluster) for role, one in self.problems.items()})
        tables = larger._tables()
        if all(len(table) for table in tables.values()):
            apart = sum(float(table.devices.min()) for table in tables.values())
            if apart <= devices or colocated_plan(larger.problems, tables) or mixed_plan(larger.problems, tables):
                return True
        return uniform_plan(larger.problems, self.space) is not None


def _next_size(cluster: Cluster, least: int, count: int) -> int:
    """``count``, or what is a little less, so that nodes are whole; but above ``least``."""
    if count <= cluster.per_node:
        return count
    step = cluster.per_node
    return max(count // step * step, (least // step + 1) * step)
