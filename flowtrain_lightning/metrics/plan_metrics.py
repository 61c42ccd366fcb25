"""Metrics from plans of steps: samples and tokens per second, how well they are packed, and MFU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from flowtrain_lightning.packing import CostModel, IntArray, StepPlan
from flowtrain_lightning.packing.cost_model import Observation
from flowtrain_lightning.packing.step_plan import Batches
from flowtrain_lightning.placement.profile import FlopModel


class PlanMetric(Metric):
    """A metric of whole steps, which every rank computes alike from their plans, so that nothing is synchronised."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)

    @abstractmethod
    def update(self, plan: StepPlan, seconds: float) -> None:
        """Takes in a step.

        Args:
            plan: of the step.
            seconds: how long it took, from the end of the step before to its own.
        """

    @abstractmethod
    def compute(self) -> dict[str, Tensor]:
        """Name -> value over all steps since the last reset."""


class Throughput(PlanMetric):
    """Samples, tokens and media items per second, of all ranks together."""

    samples: Tensor
    tokens: Tensor
    media_items: Tensor
    seconds: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("samples", "tokens", "media_items", "seconds"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)

    def update(self, plan: StepPlan, seconds: float) -> None:
        """See `PlanMetric`."""
        self.samples += len(plan.samples)
        self.tokens += int(plan.sizes.tokens.sum())
        self.media_items += plan.sizes.media_items
        self.seconds += seconds

    def compute(self) -> dict[str, Tensor]:
        """``samples_per_second``, ``tokens_per_second`` and ``media_items_per_second``."""
        return {
            f"{name}_per_second": getattr(self, name) / self.seconds for name in ("samples", "tokens", "media_items")
        }


class PackingUse(PlanMetric):
    """Tokens of the budget, and time of ranks, that packing leaves unused.

    Args:
        token_budget: of a microbatch.
        pads: microbatches are filled up to the budget by padding.
        costs: role -> what packing balances its ranks by.
    """

    tokens: Tensor
    budgets: Tensor
    steps: Tensor

    def __init__(self, token_budget: int, pads: bool, costs: Mapping[str, CostModel]) -> None:
        super().__init__()
        self.token_budget, self.pads, self.costs = token_budget, pads, dict(costs)
        for name in ("tokens", "budgets", "steps", *self.costs):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)

    def update(self, plan: StepPlan, seconds: float) -> None:
        """See `PlanMetric`."""
        self.steps += 1
        self.tokens += int(plan.sizes.tokens.sum())
        self.budgets += self.token_budget * len(_filled(plan.microbatches))
        for role in self.costs:
            setattr(self, role, self._excess(role, plan))

    def compute(self) -> dict[str, Tensor]:
        """Shares from 0 on.

        Returns:
            ``fill``, how much of the budget microbatches use; ``padding``, how much of what the backbone computes is
            padding; for each role, as ``backbone_imbalance``, by how much its busiest rank has more work than the
            average one, by the cost that packing balances, on average over the steps.
        """
        fill = self.tokens / self.budgets
        return {
            "fill": fill,
            "padding": 1 - fill if self.pads else torch.zeros_like(fill),
            **{f"{role}_imbalance": getattr(self, role) / self.steps for role in self.costs},
        }

    def _excess(self, role: str, plan: StepPlan) -> Tensor:
        cost, lengths = self.costs[role], plan.lengths(role)
        work = np.array([sum(cost.of_set(lengths[part]) for part in own if len(part)) for own in plan.batches[role]])
        before: Tensor = getattr(self, role)
        return before + (float(work.max() / work.mean()) - 1 if work.sum() > 0 else 0.0)


class FlopUtilization(PlanMetric):
    """MFU as PaLM defines it (arXiv 2204.02311, appendix B), for every role and in all.

    The FLOPs are those of the real samples: attention within each sequence alone, what is frozen left out as autograd
    leaves it out, and nothing that is computed a second time.

    Args:
        flops: role -> FLOPs of its half by the lengths of what it computes, as `count_flops` counts them.
        ranks: role -> its global ranks.
        peak: FLOP/s of one rank's device on paper, in the precision of the run.
    """

    seconds: Tensor

    def __init__(self, flops: Mapping[str, FlopModel], ranks: Mapping[str, tuple[int, ...]], peak: float) -> None:
        super().__init__()
        self.flops, self.peak = dict(flops), peak
        self.devices = {role: len(own) for role, own in ranks.items()}
        self.all_devices = len({rank for own in ranks.values() for rank in own})
        for name in (*self.devices, "seconds"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)

    def update(self, plan: StepPlan, seconds: float) -> None:
        """See `PlanMetric`."""
        for role in self.devices:
            lengths, before = plan.lengths(role), getattr(self, role)
            setattr(self, role, before + sum(self._of(role, lengths[items]) for items in _filled(plan.batches[role])))
        self.seconds += seconds

    def compute(self) -> dict[str, Tensor]:
        """``all``, and each role by its name, as ``encoder`` and ``backbone``; from 0 to 1."""
        own = {role: getattr(self, role) for role in self.devices}
        found = {"all": sum(own.values()) / (self.seconds * self.peak * self.all_devices)}
        return found | {role: flops / (self.seconds * self.peak * self.devices[role]) for role, flops in own.items()}

    def _of(self, role: str, lengths: IntArray) -> float:
        return self.flops[role].of(Observation.of(lengths, 0.0)) if role in self.flops else 0.0


def _filled(batches: Batches) -> list[IntArray]:
    """All batches that are not empty."""
    return [items for own in batches for items in own if len(items)]
