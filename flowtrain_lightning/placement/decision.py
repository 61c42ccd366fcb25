"""The allocation that a run takes, as its log, its folder and its loggers tell it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from flowtrain_lightning.allocator import Allocation, AllocationError
from flowtrain_lightning.allocator.plan_file import write_plan
from flowtrain_lightning.placement.choice import Choice
from flowtrain_lightning.placement.planning import PLAYED_STEPS, Planner
from flowtrain_lightning.profiling import Profile

FILE = "allocation.yaml"


@dataclass(frozen=True)
class Plan:
    """What an allocation was chosen by.

    Attributes:
        planner: chooses again where costs turn out to be others.
        profile: what the halves cost.
        choice: the predictions, and which was chosen.
    """

    planner: Planner
    profile: Profile
    choice: Choice


@dataclass(frozen=True)
class PlacementDecision:
    """Which allocation a run takes.

    Attributes:
        allocation: which ranks play which role.
        reason: why it is this one, as the end of a sentence.
        plan: where it was planned, and only on rank 0.
    """

    allocation: Allocation
    reason: str
    plan: Plan | None = None

    @property
    def text(self) -> str:
        """Allocation, reason and predictions, in one block."""
        lines = [self.allocation.describe(), f"  because {self.reason}."]
        if self.plan is not None:
            lines += [
                self.plan.choice.table(),
                f"  Predicted from the first {PLAYED_STEPS} steps of the data and costs measured on "
                f"{self.plan.profile.origin.device}.",
            ]
        return "\n".join(lines)

    def hyperparameters(self) -> dict[str, Any]:
        """What loggers keep; in JSON types."""
        figures = {} if self.plan is None else self.plan.choice.state_dict()
        return {"allocation": self.allocation.describe(), "allocation_reason": self.reason, **figures}

    def record(self, trainer: L.Trainer, folder: str) -> None:
        """Tell the loggers, and write ``allocation.yaml`` where the log goes. Rank 0 calls it."""
        for logger in trainer.loggers:
            if isinstance(
                logger, TensorBoardLogger
            ):  # which shows the first hyperparameters alone: those of the module
                logger.log_hyperparams(self.hyperparameters(), metrics={})
                logger.experiment.add_text("allocation", f"```\n{self.text}\n```")
            else:
                logger.log_hyperparams(self.hyperparameters())
        if "://" in folder:
            return
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_plan(self.allocation, Path(folder) / FILE, self.text, {})
        except (AllocationError, OSError) as error:
            rank_zero_warn(f"The allocation is not kept as a file: {error}")
