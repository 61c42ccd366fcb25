"""Costs of a layout as runs sleep for them: longer by a factor, so that ranks which share cores seldom wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.allocator import BACKBONE, ENCODER
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.data import PackingConfig
from flowtrain_lightning.packing import CostModel, IntArray
from flowtrain_lightning.packing.cost_model import Observation, fit_cost
from flowtrain_lightning.packing.step_work import PassTimes
from flowtrain_lightning.placement.layout_costs import LayoutCosts

_PARTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class StretchedCosts:
    """Costs that are all longer by a factor, see `LayoutCosts`.

    Attributes:
        costs: of the layout.
        stretch: the factor.
        encoder_trains: whoever trains does not work ahead into later steps. An encoder may train here that is frozen
            in ``costs``: its backward takes no time.
    """

    costs: LayoutCosts
    stretch: float
    encoder_trains: bool

    def batch(self, role: str, lengths: IntArray) -> PassTimes:
        """Seconds of forward and of backward of a batch."""
        return PassTimes(*(self.stretch * seconds for seconds in self.costs.batch(role, lengths)))

    def end_of_step(self, role: str) -> tuple[float, float]:
        """Seconds of the reduction of gradients, and of the optimizer."""
        reduction, optimizer = self.costs.end_of_step(role)
        return self.stretch * reduction, self.stretch * optimizer

    def on_the_way(self, role: str, lengths: IntArray) -> float:
        """Seconds until a microbatch's hidden states are with the next stage."""
        return self.stretch * self.costs.on_the_way(role, lengths)


def packing_by(costs: LayoutCosts, problems: Problems) -> PackingConfig:
    """Steps are packed by cost models that are fitted to what the costs say, as they are to what a profile measures.

    Args:
        costs: of the layout.
        problems: role -> what was planned for, which has the budgets of batches.
    """
    cost, encoder_cost = (_fitted(costs, role, problems[role].load.budget) for role in (BACKBONE, ENCODER))
    return PackingConfig(cost, {ENCODER: encoder_cost})


def _fitted(costs: LayoutCosts, role: str, budget: int) -> CostModel:
    """By full batches and parts of them, of one sequence or of several."""
    several = [np.full(count, budget // (part * count)) for part in _PARTS for count in _PARTS]
    return fit_cost([Observation.of(lengths, sum(costs.batch(role, lengths))) for lengths in several])
