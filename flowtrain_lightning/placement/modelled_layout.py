"""What ranks of an allocation take for each piece of a step by the models of time, in any layout that training runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flowtrain_lightning.allocator import BACKBONE, ENCODER, Allocation, AllocationError, RoleProblem
from flowtrain_lightning.allocator.candidates import why_undividable
from flowtrain_lightning.allocator.pass_time import pass_time
from flowtrain_lightning.allocator.role_problem import Family, family_of
from flowtrain_lightning.allocator.role_time import RoleTime, role_time, slowest_of
from flowtrain_lightning.allocator.sharing_time import sharing_time
from flowtrain_lightning.packing import IntArray


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
            reason = why_undividable(self.problems[role], layout.tensor, layout.pipeline, layout.context)
            if reason is not None:
                raise AllocationError(reason)

    @property
    def encoder_trains(self) -> bool:
        """See `LayoutCosts`."""
        return self.problems[ENCODER].half.trains

    @cached_property
    def forward_share(self) -> float:
        """See `LayoutCosts`."""
        forward, backward = self._batch(BACKBONE, self.problems[BACKBONE].load.lengths)
        return forward / (forward + backward)

    def microbatch(self, tokens: IntArray) -> float:
        """See `LayoutCosts`."""
        return sum(self._batch(BACKBONE, tokens))

    def encoder_batch(self, patches: IntArray) -> tuple[float, float]:
        """See `LayoutCosts`."""
        return self._batch(ENCODER, patches)

    def end_of_step(self, role: str) -> tuple[float, float]:
        """See `LayoutCosts`."""
        time = self._times[role]
        return float(time.reduction[0]), float(time.optimizer[0])

    @cached_property
    def _families(self) -> dict[str, Family]:
        recompute, offload = self.allocation.recompute, self.allocation.offload
        return {
            role: family_of(one, recompute.get(role, "none"), offload.get(role, "none"))
            for role, one in self.allocation.layouts.items()
        }

    @cached_property
    def _times(self) -> dict[str, RoleTime]:
        return {role: role_time(self.problems[role], family) for role, family in self._families.items()}

    def _batch(self, role: str, lengths: IntArray) -> tuple[float, float]:
        """Forward and backward of one batch, on the slowest of the role's ranks."""
        known, family = self.problems[role], self._families[role]
        problem = replace(known, load=replace(known.load, lengths=lengths))
        once = pass_time(problem, family, np.array([float(lengths.sum())]))
        sharing = sharing_time(problem, family, once, self._times[role].microbatches)
        # Collectives among tensor and context ranks are in both; how much of them is in which is as with computing.
        computing = once.forward + once.backward
        slower = 1 + problem.efficiency.jitter * slowest_of(family.data * family.replica) + once.exchange / computing
        forward, backward = once.forward * slower + sharing.forward, once.backward * slower + sharing.backward
        return float(forward[0]), float(backward[0])
