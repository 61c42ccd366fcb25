"""How full microbatches are, and how evenly the work of a step lies on ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flowtrain_lightning.allocator import BACKBONE, ENCODER
from flowtrain_lightning.metrics.plan_metric import PlanMetric
from flowtrain_lightning.packing import CostModel, IntArray, StepPlan


class PackingUse(PlanMetric):
    """What packing leaves unused.

    Args:
        token_budget: of a microbatch.
        pads: microbatches are filled up to the budget by padding.
        cost: what packing balances backbone ranks by.
        encoder_cost: what it balances encoder ranks by.
    """

    tokens: Tensor
    budgets: Tensor
    steps: Tensor

    def __init__(self, token_budget: int, pads: bool, cost: CostModel, encoder_cost: CostModel) -> None:
        super().__init__()
        self.token_budget, self.pads = token_budget, pads
        self.costs = {BACKBONE: cost, ENCODER: encoder_cost}
        for name in ("tokens", "budgets", "steps", *self.costs):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)

    def update(self, plan: StepPlan, seconds: float) -> None:
        """See `PlanMetric`."""
        self.steps += 1
        self.tokens += int(plan.sizes.tokens.sum())
        self.budgets += self.token_budget * sum(len(part) > 0 for of_rank in plan.microbatches for part in of_rank)
        setattr(self, BACKBONE, self._excess(BACKBONE, plan.microbatches, plan.sizes.tokens))
        setattr(self, ENCODER, self._excess(ENCODER, plan.encoder_batches, plan.sizes.media_patches))

    def compute(self) -> dict[str, Tensor]:
        """Shares from 0 on.

        Returns:
            ``fill``, how much of the budget microbatches use; ``padding``, how much of what the backbone computes is
            padding; ``backbone_imbalance`` and ``encoder_imbalance``, by how much the busiest rank of a role has more
            work than the average one, by the cost that packing balances, on average over the steps.
        """
        fill = self.tokens / self.budgets
        return {
            "fill": fill,
            "padding": 1 - fill if self.pads else torch.zeros_like(fill),
            **{f"{role}_imbalance": getattr(self, role) / self.steps for role in self.costs},
        }

    def _excess(self, role: str, batches: tuple[tuple[IntArray, ...], ...], lengths: IntArray) -> Tensor:
        cost = self.costs[role]
        work = np.array([sum(cost.of_set(lengths[part]) for part in of_rank if len(part)) for of_rank in batches])
        before: Tensor = getattr(self, role)
        return before + (float(work.max() / work.mean()) - 1 if work.sum() > 0 else 0.0)
