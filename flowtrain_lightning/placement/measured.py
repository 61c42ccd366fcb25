"""Costs from a profile: the run's own first steps, packed for every split of the ranks and simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import ClassVar

import numpy as np

from flowtrain_lightning.allocator import (
    PRECISIONS,
    Allocation,
    NoPlanError,
    Placement,
    Prediction,
    RoleGraph,
    RoleLayout,
    default_allocation,
)
from flowtrain_lightning.allocator.memory_use import USABLE
from flowtrain_lightning.packing import PackingError, StepPlan
from flowtrain_lightning.packing.simulator import simulate_steps
from flowtrain_lightning.packing.step_members import TWO_ROLES
from flowtrain_lightning.packing.step_work import StepWork, TimedBatch
from flowtrain_lightning.placement.lane_work import lane_work
from flowtrain_lightning.placement.layout_costs import ProfiledLayoutCosts
from flowtrain_lightning.placement.profile import Profile
from flowtrain_lightning.placement.request import why_it_cannot_run

SIMULATED_STEPS = 6
"""So many steps tell how uneven ranks are, and how far an encoder that does not train works ahead."""

_SHARDED = RoleLayout(shard="fsdp")

_TRIED_AT_ONCE = 12
"""Numbers of encoder ranks that one round of the search looks at."""

PlanSteps = Callable[[Allocation, int], Sequence[StepPlan]]
"""The plans of the run's first steps on an allocation, at most so many; a PackingError where they cannot be dealt."""


@dataclass(frozen=True)
class Processors:
    """Ranks that share what they compute on.

    Attributes:
        sharing: ranks that share something, such as the ranks of one device or all ranks of one CPU.
        capacity: how many of these ranks it serves at full speed.
    """

    sharing: tuple[tuple[int, ...], ...]
    capacity: float


@dataclass(frozen=True)
class MeasuredPrediction(Prediction):
    """Times of steps on an allocation, by a profile.

    Attributes:
        allocation: which ranks do what.
    """

    allocation: Allocation


@dataclass(frozen=True)
class MeasuredCosts:
    """Predicts what steps take by simulating the run's first ones with the costs of a profile.

    Moving features, loading and Lightning's own work take no time here; no placement has less of them.

    Attributes:
        profile: what the halves cost on one device.
        plan_steps: gives the steps.
        ranks: of the run, at least 2.
        processors: which of the ranks share what they compute on.
        kept_batches: encoder batches whose activations each encoder rank keeps.
        nodes: on which the ranks run, as many on each.
        ranks_per_device: ranks that share a device. With more than one, each of them has one role: two copies of both
            halves on a device would only take its memory.
        rank_bytes: memory of a device for each of its ranks; None where it is not known, as on CPUs.
        graph: the roles, and what flows between them.
    """

    margin: ClassVar[float] = 0.01

    profile: Profile
    plan_steps: PlanSteps
    ranks: int
    processors: Processors
    kept_batches: int
    nodes: int = 1
    ranks_per_device: int = 1
    rank_bytes: float | None = None
    graph: RoleGraph = TWO_ROLES

    def predictions(self) -> tuple[MeasuredPrediction, ...]:
        """Colocated roles; separate and mixed ones with ranks that only encode spread evenly over the nodes.

        On a few ranks these are all such allocations. On more, some numbers of encoder ranks are tried, then
        more of them about the best one, and so on: a thousand ranks take some eighty predictions. Several roles but
        the trunk share these ranks by what they have to do. Roles hold whole copies; where these do not fit, as far as
        weights, gradients and optimizer tell, the trunk, the others or all hold shards (FSDP2).

        Raises:
            NoPlanError: the steps cannot be dealt to so many ranks, or nothing fits.
        """
        found = search_splits(self.ranks - 1, partial(self._apart, "separate"))
        if self.ranks_per_device == 1:
            together = self._fitting(default_allocation(self.ranks, "colocated", graph=self.graph))
            mixed = [] if self.graph.behind else search_splits(self.ranks - 1, partial(self._apart, "mixed"))
            found = [*([together] if together is not None else []), *found, *mixed]
        if not found:
            raise NoPlanError(f"the steps cannot be dealt to {self.ranks} ranks in any way, or the halves do not fit")
        return tuple(found)

    def kept_bytes(self, allocation: Allocation) -> float:
        """Weights, gradients and optimizer states on the fullest rank, with AdamW and a precision of `PRECISIONS`."""
        numbers = PRECISIONS[str(self.profile.origin.settings["precision"])]
        held = dict.fromkeys(range(allocation.size), 0.0)
        for role, layout in allocation.layouts.items():
            half = self.profile.roles[role]
            each = numbers.weights + (0 if layout.shares_weights else numbers.copies)
            each += half.trains * (numbers.gradients + numbers.states)
            shards = layout.data // layout.replicas if layout.shares_weights else 1
            for rank in allocation.ranks[role]:
                held[rank] += half.parameters * each / shards
        return max(held.values())

    def predict(self, allocation: Allocation) -> MeasuredPrediction | None:
        """Returns the seconds of steps on an allocation, or None where they cannot be dealt to it."""
        try:
            plans = self.plan_steps(allocation, SIMULATED_STEPS)
        except PackingError:
            return None
        return predict_steps(plans, allocation, self.profile, self.processors, self.kept_batches)

    def _apart(self, placement: Placement, encoder_ranks: int) -> MeasuredPrediction | None:
        wanted: int | Mapping[str, int] = encoder_ranks
        if placement == "separate" and len(self._others) > 1:
            if encoder_ranks < len(self._others):
                return None
            wanted = shared_out(encoder_ranks, self._work_of_others)
        per_node = self.ranks // self.nodes
        return self._fitting(
            default_allocation(self.ranks, placement, wanted, per_node, self.ranks_per_device, self.graph)
        )

    @property
    def _others(self) -> tuple[str, ...]:
        """The roles but the trunk."""
        return (*self.graph.producers, *self.graph.behind)

    @cached_property
    def _work_of_others(self) -> dict[str, float]:
        """Role but the trunk -> seconds of its media in the first steps."""
        try:
            plans = self.plan_steps(default_allocation(self.ranks, "colocated", graph=self.graph), SIMULATED_STEPS)
        except PackingError:
            plans = ()
        return {
            role: sum(
                self.profile.roles[role].cost.of_set(plan.sizes.media_patches[batch])
                for plan in plans
                for own in plan.batches[role]
                for batch in own
                if len(batch)
            )
            for role in self._others
        }

    def _fitting(self, whole: Allocation) -> MeasuredPrediction | None:
        """Returns the seconds of steps on these ranks, with as few roles in shards as fit; None where nothing does."""
        trunk, others = self.graph.trunk, self._others
        for sharded in ((), (trunk,), others, (*others, trunk)):  # the simplest first
            allocation = whole.with_roles(dict.fromkeys(sharded, _SHARDED))
            if self._runs(allocation) and self._fits(allocation):
                return self.predict(allocation)
        return None

    def _runs(self, allocation: Allocation) -> bool:
        """Training offers it, and no frozen trunk in shards is beside an encoder that trains: ranks would hang."""
        if why_it_cannot_run(allocation) is not None:
            return False
        trunk, trains = self.graph.trunk, {role: half.trains for role, half in self.profile.roles.items()}
        an_encoder_trains = any(trains[role] for role in self.graph.producers)
        return trains[trunk] or not an_encoder_trains or not allocation.layouts[trunk].shares_weights

    def _fits(self, allocation: Allocation) -> bool:
        whole = all(layout.is_whole_copies for layout in allocation.layouts.values())
        if whole and allocation.placement != "separate" and not self.profile.whole:
            return False  # it was tried
        if self.rank_bytes is None or self.profile.origin.settings["precision"] not in PRECISIONS:
            return whole  # nothing says what fits
        return self.kept_bytes(allocation) <= USABLE * self.rank_bytes


def shared_out(ranks: int, work: Mapping[str, float]) -> dict[str, int]:
    """Role -> its ranks, at least 1, so that the one that takes longest takes as short as can be.

    Args:
        ranks: at least as many as roles.
        work: role -> seconds of one rank.
    """
    counts = dict.fromkeys(work, 1)
    for _ in range(ranks - len(counts)):
        counts[max(counts, key=lambda role: work[role] / counts[role])] += 1
    return counts


def search_splits(most: int, predict: Callable[[int], MeasuredPrediction | None]) -> list[MeasuredPrediction]:
    """Predictions for numbers of encoder ranks from 1 to ``most``, the closer together the closer to the best."""
    found: dict[int, MeasuredPrediction] = {}
    low, high = 1, most
    while True:
        tried = sorted({round(float(number)) for number in np.geomspace(low, high, _TRIED_AT_ONCE)})
        if high - low < _TRIED_AT_ONCE:
            tried = list(range(low, high + 1))
        for first, following in pairwise([*tried, high + 1]):
            for number in range(first, following):  # where the steps cannot be dealt to it, the next one stands for it
                if number not in found and (prediction := predict(number)) is not None:
                    found[number] = prediction
                if number in found:
                    break
        if not found or len(tried) > high - low:
            return [found[number] for number in sorted(found)]
        best = min(found, key=lambda number: found[number].seconds)
        low = max((number for number in tried if number < best), default=low)
        high = min((number for number in tried if number > best), default=high)


def predict_steps(
    plans: Sequence[StepPlan], allocation: Allocation, profile: Profile, processors: Processors, kept_batches: int
) -> MeasuredPrediction:
    """Returns the seconds of consecutive steps on the allocation that they were planned for.

    Args:
        plans: the steps.
        allocation: of whole copies or of shards (FSDP2).
        profile: what everything costs.
        processors: which of the ranks share what they compute on.
        kept_batches: encoder batches whose activations each encoder rank keeps.
    """
    works, rules = lane_work(plans, allocation, ProfiledLayoutCosts(profile, allocation), kept_batches)
    # Round once more to the first step, for what a step takes from one backbone's end to the next.
    ends = simulate_steps([*works, works[0]], rules).step_ends
    simulated = (ends[-1] - ends[0]) / len(works)
    busy = _busy_seconds(works, allocation)
    crowded = max(sum(sum(busy[rank].values()) for rank in ranks) / processors.capacity for ranks in processors.sharing)
    seconds = max(simulated, crowded)
    samples = float(np.mean([len(plan.samples) for plan in plans]))
    return MeasuredPrediction(
        kind=allocation.placement,
        name=short_name(allocation),
        seconds=seconds,
        samples_per_second=samples / seconds,
        idle=_idle_shares(busy, allocation, seconds),
        allocation=allocation,
    )


def short_name(allocation: Allocation) -> str:
    """An allocation in a few words, as in ``separate 1 + 3``: ranks that only encode, backbone ranks, then shards."""
    backbones = len(allocation.ranks[allocation.trunk])
    only_encode = allocation.size - backbones
    sharded = [role for role, layout in allocation.layouts.items() if layout.shares_weights]
    shards = f", {' and '.join(sharded)} in shards" if sharded else ""
    ranks = f"{allocation.placement} {only_encode} + {backbones}" if only_encode else f"colocated x{backbones}"
    return ranks + shards


def _busy_seconds(works: Sequence[StepWork], allocation: Allocation) -> dict[int, dict[str, float]]:
    """Rank -> role -> seconds that it computes for that role in a step, on average."""
    busy: dict[int, dict[str, float]] = {rank: {} for rank in range(allocation.size)}
    for role in allocation.roles:
        for member, ranks in enumerate(allocation.members(role)):
            of_steps = [sum(map(_batch_seconds, work[role][member])) for work in works]
            busy.update({rank: {**busy[rank], role: float(np.mean(of_steps))} for rank in ranks})
    return busy


def _batch_seconds(batch: TimedBatch) -> float:
    return batch.seconds + (batch.forward if batch.recomputed else 0.0)


def _idle_shares(busy: dict[int, dict[str, float]], allocation: Allocation, seconds: float) -> dict[str, float]:
    """Role -> idle share of its ranks; a rank with two roles is idle where it computes for neither."""
    return {
        role: max(0.0, 1 - float(np.mean([sum(busy[rank].values()) for rank in allocation.ranks[role]])) / seconds)
        for role in allocation.roles
    }
