"""What metrics of steps have in common."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor
from torchmetrics import Metric

from flowtrain_lightning.packing import StepPlan


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
