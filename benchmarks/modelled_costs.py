"""What the planner's model of a module and a device says that each batch costs in a layout, for runs that sleep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.emulation import FORWARD_SHARE
from flowtrain_lightning.allocator import BACKBONE, ENCODER, RoleProblem
from flowtrain_lightning.allocator.candidates import Candidate
from flowtrain_lightning.allocator.pass_time import pass_time
from flowtrain_lightning.allocator.placements import Problems
from flowtrain_lightning.allocator.role_problem import family_of
from flowtrain_lightning.allocator.sharing_time import sharing_time
from flowtrain_lightning.data import PackingConfig
from flowtrain_lightning.packing import CostModel

_SIZES = np.geomspace(16, 2**20, 256)
"""Tokens of batches whose time is computed; that of others is read off between them."""


@dataclass(frozen=True)
class RoleCost:
    """Seconds of one role in one layout.

    Attributes:
        sizes: ``[sizes]`` tokens of a batch, rising.
        forward: ``[sizes]`` seconds of its forward.
        backward: ``[sizes]`` seconds of its backward, with what is computed again.
        end: seconds in which a step's gradients are summed and its weights updated.
    """

    sizes: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    end: float

    def of(self, tokens: float) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        return float(np.interp(tokens, self.sizes, self.forward)), float(np.interp(tokens, self.sizes, self.backward))

    def per_token(self, tokens: float) -> float:
        """Seconds of a token in a batch of so many."""
        return sum(self.of(tokens)) / tokens


def role_cost(problem: RoleProblem, candidate: Candidate, stretch: float) -> RoleCost:
    """What a role costs in a layout.

    Collectives that nothing hides count as computing, a third of them forward. Ranks that are slow by chance are left
    out: ranks that sleep are not.

    Args:
        problem: the role.
        candidate: its layout, without a pipeline.
        stretch: by which factor all times are longer.
    """
    one = family_of(candidate.layout, candidate.recompute)
    family = replace(one, data=np.full_like(_SIZES, one.data[0]))
    once = pass_time(problem, family, _SIZES)
    sharing, _ = sharing_time(problem, family, once, np.ones_like(_SIZES))
    shared = once.exchange + sharing
    share = FORWARD_SHARE if once.backward.any() else 1.0
    forward, backward = once.forward + share * shared, once.backward + (1 - share) * shared
    end = stretch * float(candidate.details(problem).time.at_the_end[0])
    return RoleCost(tuple(_SIZES), tuple(stretch * forward), tuple(stretch * backward), end)


@dataclass(frozen=True)
class ModelledCost:
    """Seconds of both roles, see `benchmarks.emulation.Costs`.

    Attributes:
        roles: role -> its costs.
        budgets: role -> the tokens of a full batch, by whose time steps are packed.
        encoder_trains: an encoder that does not has no backward, and works ahead into later steps.
    """

    roles: dict[str, RoleCost]
    budgets: dict[str, int]
    encoder_trains: bool

    def encoder(self, patches: int) -> tuple[float, float]:
        """Seconds of forward and of backward of an encoder batch."""
        return self.roles[ENCODER].of(patches)

    def backbone(self, tokens: int) -> tuple[float, float]:
        """Seconds of forward and of backward of a microbatch."""
        return self.roles[BACKBONE].of(tokens)

    def step_end(self, role: str) -> float:
        """Seconds of a role's sum of gradients and optimizer."""
        return self.roles[role].end

    @property
    def packing(self) -> PackingConfig:
        """How steps are packed by these costs."""
        linear = {role: cost.per_token(self.budgets[role]) for role, cost in self.roles.items()}
        return PackingConfig(CostModel(linear[BACKBONE], 0.0, 0.0), CostModel(linear[ENCODER], 0.0, 0.0))


def modelled_cost(problems: Problems, chosen: Mapping[str, Candidate], stretch: float = 1.0) -> ModelledCost:
    """What a plan's batches cost.

    Args:
        problems: role -> what was planned for.
        chosen: role -> its layout, without pipelines.
        stretch: by which factor all times are longer.
    """
    return ModelledCost(
        {role: role_cost(problem, chosen[role], stretch) for role, problem in problems.items()},
        {role: problem.load.budget for role, problem in problems.items()},
        problems[ENCODER].half.trains,
    )
