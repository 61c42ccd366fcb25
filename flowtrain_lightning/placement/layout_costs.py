"""Costs of each piece of a step on its ranks, by a profile or by the models of time, for simulating it.

A profile knows whole copies on one rank, and how long ranks take to sum. What layouts add follows from that: a ring
sums in a scatter and a gather of as many bytes (Thakur et al. 2005), so each takes half of it. None of it is taken to
be hidden by computing, as on CPUs, where both need the same cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from flowtrain_lightning.allocator import Allocation, AllocationError, RoleProblem
from flowtrain_lightning.allocator.candidates import why_undividable
from flowtrain_lightning.allocator.flops import FloatArray, pairs_of_each
from flowtrain_lightning.allocator.memory_use import kept_activations
from flowtrain_lightning.allocator.pass_time import pass_time
from flowtrain_lightning.allocator.role_problem import Family, family_of
from flowtrain_lightning.allocator.role_time import RoleTime, batches, offload_seconds, role_time, slowest_of
from flowtrain_lightning.allocator.sharing_time import sharing_time
from flowtrain_lightning.allocator.stage_layers import layers_of_chunks
from flowtrain_lightning.allocator.stages import chunk_of_problem, seconds_between_stages, weights_seconds
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.packing.stage_entries import chunk_names, stage_names
from flowtrain_lightning.packing.step_work import PassTimes
from flowtrain_lightning.placement.profile import Profile

_WIDTHS = {"64-true": 8, "32-true": 4}
"""Precision -> bytes of a weight that is gathered; other precisions compute in 16 bits."""


class LayoutCosts(Protocol):
    """Seconds of what the ranks of one allocation do."""

    @property
    def encoder_trains(self) -> bool:
        """Encoder batches have backwards."""

    def batch(self, role: str, lengths: IntArray) -> PassTimes:
        """Forward and backward of a batch of a role or chunk, by the ``[items]`` lengths of what is in it."""

    def end_of_step(self, role: str) -> tuple[float, float]:
        """The gradient reduction and the optimizer, of a role or stage."""

    def on_the_way(self, role: str, lengths: IntArray) -> float:
        """A batch's hidden states from one stage of a role to the next, by the lengths of its items."""


@dataclass(frozen=True)
class ProfiledLayoutCosts:
    """Costs by a profile, for ranks that compute whole layers on whole sequences.

    Attributes:
        profile: of whole copies on one rank.
        allocation: of the same roles.

    Raises:
        AllocationError: other roles, or layouts of which a profile does not say what they take.
    """

    profile: Profile
    allocation: Allocation

    def __post_init__(self) -> None:
        if set(self.allocation.layouts) != set(self.profile.roles):
            raise AllocationError(
                f"The profile has the roles {', '.join(self.profile.roles)}, but the plan has "
                f"{', '.join(self.allocation.layouts)}."
            )
        for role, layout in self.allocation.layouts.items():
            if layout.ranks_of_member > 1 or layout.shard.startswith("zero") or layout.shard == "deepspeed-3":
                raise AllocationError(
                    f"The plan's {role} has {layout.describe()}, but a profile of whole layers and sequences does not "
                    "say what ranks take that divide these. The module's dimensions do: `flowtrain simulate --model`."
                )

    @property
    def encoder_trains(self) -> bool:
        """See `LayoutCosts`."""
        return any(self.profile.roles[role].trains for role in self.allocation.producers)

    def batch(self, role: str, lengths: IntArray) -> PassTimes:
        """See `LayoutCosts`."""
        half, (gather, back) = self.profile.roles[role], self._sharing(role)
        seconds = half.cost.of_set(lengths)
        if role in self.allocation.producers and not half.trains:
            return PassTimes(seconds + gather, 0.0)
        forward = seconds * half.forward_share
        return PassTimes(forward + gather, seconds - forward + self._repeated_share(role) * forward + back)

    def end_of_step(self, role: str) -> tuple[float, float]:
        """See `LayoutCosts`."""
        half, layout, shards = self.profile.roles[role], self.allocation.layouts[role], self._shards(role)
        if not layout.by_deepspeed:
            return self._summing(half.gradient_bytes / shards, layout.data // shards), half.optimizer_seconds / shards
        updated = self._summing(half.gradient_bytes, shards) / 2
        scattered = self._summing(half.gradient_bytes, shards) / 2 if layout.shard == "deepspeed-1" else 0.0
        return scattered + updated, half.optimizer_seconds / shards

    def on_the_way(self, role: str, lengths: IntArray) -> float:
        """See `LayoutCosts`: a profile has no stages."""
        return 0.0

    def _sharing(self, role: str) -> tuple[float, float]:
        """Seconds that a layout adds to a rank's forward and backward of one batch."""
        half, layout, shards = self.profile.roles[role], self.allocation.layouts[role], self._shards(role)
        scatter = self._summing(half.gradient_bytes, shards) / 2
        if layout.by_deepspeed:
            return 0.0, scatter if layout.shard == "deepspeed-2" else 0.0
        width = _WIDTHS.get(str(self.profile.origin.settings.get("precision")), 2)
        gather = self._summing(half.parameters * width, shards) / 2
        return gather, gather + scatter

    def _repeated_share(self, role: str) -> float:
        """The part of a forward that a backward computes again; what costs no product is taken to cost nothing."""
        return 1.0 if self.allocation.recompute.get(role) == "full" else 0.0

    def _shards(self, role: str) -> int:
        """Ranks that hold once between them what the role's layout divides."""
        layout = self.allocation.layouts[role]
        return 1 if layout.shard == "replicate" else layout.data // layout.replicas

    def _summing(self, size: float, ranks: int) -> float:
        return 0.0 if self.profile.reduction is None else self.profile.reduction.seconds(round(size), ranks)


@dataclass(frozen=True)
class ModelledLayoutCosts:
    """Costs by a module's dimensions: the `LayoutCosts` of what `given_plan` predicts for the mean microbatch.

    Attributes:
        problems: role -> what is computed, and on what.
        allocation: of the same roles.

    Raises:
        AllocationError: other roles, other devices, or degrees that do not divide heads or layers.
    """

    problems: Mapping[str, RoleProblem]
    allocation: Allocation

    def __post_init__(self) -> None:
        if set(self.allocation.layouts) != set(self.problems):
            raise AllocationError(
                f"The module has the roles {', '.join(self.problems)}, but the plan has "
                f"{', '.join(self.allocation.layouts)}."
            )
        for role, layout in self.allocation.layouts.items():
            degrees = (layout.tensor, layout.stages.runs, layout.context, layout.expert)
            reason = why_undividable(self.problems[role], *degrees)
            if reason is not None:
                raise AllocationError(reason)

    @property
    def encoder_trains(self) -> bool:
        """See `LayoutCosts`."""
        return any(self.problems[role].half.trains for role in self.allocation.producers)

    def batch(self, role: str, lengths: IntArray) -> PassTimes:
        """See `LayoutCosts`."""
        return self.batches(role, [lengths])[0]

    def batches(self, role: str, lengths: Sequence[IntArray]) -> list[PassTimes]:
        """Forward and backward of many batches of a role, all at once: they are columns of the same arrays."""
        if not lengths:
            return []
        problem, family = self._parts[role]
        starts = np.cumsum([0, *map(len, lengths[:-1])])
        joined = np.concatenate(lengths)
        tokens = np.add.reduceat(joined, starts).astype(np.float64)
        exact = joined + problem.half.extra_tokens
        attending = np.add.reduceat(exact, starts).astype(np.float64)
        pairs = [
            np.add.reduceat(pairs_of_each(exact, part.causal, part.window), starts) / attending
            for part in problem.half.layers
        ]
        once = pass_time(problem, family, tokens, pairs)
        sharing = sharing_time(problem, family, once, self._times[role].microbatches)
        # Collectives among tensor and context ranks are in both; how much of them is in which is as with computing.
        computing = once.forward + once.backward
        slower = 1 + problem.efficiency.jitter * slowest_of(self._ranks_beside(role)) + once.exchange / computing
        forward, backward = once.forward * slower + sharing.forward, once.backward * slower + sharing.backward
        backward = backward + offload_seconds(problem, family, once, tokens)
        weights = np.zeros_like(tokens)
        if self.allocation.layouts[self.allocation.trunk].stages.splits:
            weights = weights_seconds(problem, family, once, tokens, pairs) * slower
        return list(map(PassTimes, forward.tolist(), backward.tolist(), weights.tolist()))

    def end_of_step(self, role: str) -> tuple[float, float]:
        """See `LayoutCosts`."""
        times = [self._times[part] for part in self._chunks.get(role, (role,))]
        return sum(float(time.reduction[0]) for time in times), sum(float(time.optimizer[0]) for time in times)

    def on_the_way(self, role: str, lengths: IntArray) -> float:
        """See `LayoutCosts`."""
        tokens = np.array([float(lengths.sum())])
        return float(seconds_between_stages(self.problems[role], self._families[role], tokens)[0])

    @cached_property
    def row_bytes(self) -> dict[str, float]:
        """Role, or stage of one -> bytes of a token or patch that it keeps for its backward."""
        layouts = self.allocation.layouts.items()
        parts = [part for role, layout in layouts for part in stage_names(role, layout.pipeline) or (role,)]
        return {part: kept_activations(*self._parts[part]) for part in parts}

    @cached_property
    def _families(self) -> dict[str, Family]:
        recompute, offload = self.allocation.recompute, self.allocation.offload
        return {
            role: family_of(
                one, recompute.get(role, "none"), offload.get(role, "none"), self.allocation.activation_bytes
            )
            for role, one in self.allocation.layouts.items()
        }

    @cached_property
    def _parts(self) -> dict[str, tuple[RoleProblem, Family]]:
        """Role or chunk -> what it computes, and how its ranks are laid out."""
        parts = {role: (self.problems[role], family) for role, family in self._families.items()}
        for role, (problem, family) in [*parts.items()]:
            microbatches, _ = batches(problem, family)
            forwards = round(float(microbatches[0] * family.data[0]))
            pipeline = self.allocation.layouts[role].stages
            layers = layers_of_chunks(problem, pipeline) if pipeline.stages > 1 else ()
            for number, name in enumerate(chunk_names(role, pipeline)):
                parts[name] = chunk_of_problem(problem, family, number, layers, forwards)
        return parts

    @cached_property
    def _chunks(self) -> dict[str, list[str]]:
        """Stage -> the names of its chunks."""
        found = {}
        for role, layout in self.allocation.layouts.items():
            pipeline, names = layout.stages, chunk_names(role, layout.stages)
            for number, stage in enumerate(stage_names(role, pipeline.stages)):
                found[stage] = [names[pipeline.number(number, chunk)] for chunk in range(pipeline.chunks)]
        return found

    @cached_property
    def _roles(self) -> dict[str, str]:
        """Role, stage or chunk -> the role of which it is."""
        layouts = self.allocation.layouts.items()
        named = (
            (role, stage_names(role, layout.pipeline), chunk_names(role, layout.stages)) for role, layout in layouts
        )
        return {name: role for role, stages, chunks in named for name in (role, *stages, *chunks)}

    @cached_property
    def _times(self) -> dict[str, RoleTime]:
        return {name: role_time(*part) for name, part in self._parts.items()}

    def _ranks_beside(self, name: str) -> FloatArray:
        """The ranks of the role, all of which wait for the slowest; of a stage those of all stages."""
        family = self._families[self._roles[name]]
        return family.data * family.replica


@dataclass(frozen=True)
class ReadLayoutCosts(ModelledLayoutCosts):
    """The same where features of frozen encoders are read, not encoded: those cost the ranks nothing."""

    def batches(self, role: str, lengths: Sequence[IntArray]) -> list[PassTimes]:
        """See `ModelledLayoutCosts`."""
        if role in self.allocation.producers:
            return [PassTimes(0.0, 0.0)] * len(lengths)
        return super().batches(role, lengths)
