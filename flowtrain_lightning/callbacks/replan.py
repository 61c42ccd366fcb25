"""Warns when the halves have come to take other times than those by which the allocation was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from flowtrain_lightning.allocator import (
    Allocation,
    AllocationError,
    PlacementChoice,
    choose_placement,
)
from flowtrain_lightning.allocator.plan_file import write_plan
from flowtrain_lightning.data import StepBatch
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.placement.measured import MeasuredCosts, MeasuredPrediction
from flowtrain_lightning.placement.profile import Profile
from flowtrain_lightning.placement.text_table import text_table
from flowtrain_lightning.runtime.rank_metrics import joined_timings
from flowtrain_lightning.runtime.runner import RoleRunner
from flowtrain_lightning.strategy import FlowTrainStrategy

BETTER_ALLOCATION_FILE = "better_allocation.yaml"


class FlowReplan(L.Callback):
    """Looks whether another allocation has become faster than the one that was planned, and says so once.

    How long microbatches and encoder batches take is compared with the profile by which the allocation was planned.
    Where a half has drifted from it by more than ``threshold`` in the median of ``steps`` steps, the run's first steps
    are simulated again with the times as they are now. If another allocation wins, a warning shows it, and
    ``better_allocation.yaml`` beside the log holds it. The run itself stays as it is: roles change with a new start.

    Without a planned allocation (one was given, or is that of a checkpoint) there is nothing to compare with.

    Args:
        threshold: share by which a half's times may differ from the plan.
        steps: how many steps are looked at together.

    Raises:
        ValueError: a threshold that is not positive, or fewer than 1 step.
    """

    def __init__(self, threshold: float = 0.2, steps: int = 50) -> None:
        if threshold <= 0 or steps < 1:
            raise ValueError(
                f"threshold is {threshold} and steps is {steps}; the threshold must be above 0, and steps at least 1."
            )
        self.threshold = threshold
        self.steps = steps
        self._runner: RoleRunner | None = None
        self._costs: MeasuredCosts | None = None
        self._allocation: Allocation | None = None
        self._folder = ""
        self._ratios: dict[str, list[float]] = {}
        self._seen = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Has the times collected."""
        strategy: FlowTrainStrategy = trainer.strategy  # type: ignore[assignment]
        self._runner = getattr(strategy, "runner", None)
        if self._runner is None:
            return
        self._ratios, self._seen = {}, 0
        self._runner.collects_timings = True  # on all ranks, though rank 0 alone compares
        self._folder = str(trainer.log_dir or trainer.default_root_dir)
        self._costs, self._allocation = strategy.placement_decision.costs, strategy.placement_decision.allocation
        if self._costs is None:
            rank_zero_info(
                f"flowtrain: FlowReplan has no plan to compare with: the allocation is what it is because "
                f"{strategy.placement_decision.reason}."
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Takes in the step's times, and looks at them every ``steps`` steps."""
        if self._runner is None or self._costs is None:
            return
        for role, timings in joined_timings(note["timings"] for note in self._runner.report.notes).items():
            planned = sum(_seconds(self._costs.profile.roles[role].cost, *sizes) for *sizes, _ in timings)
            if planned > 0:
                self._ratios.setdefault(role, []).append(sum(seconds for *_, seconds in timings) / planned)
        self._seen += 1
        if self._seen % self.steps == 0:
            drift = {role: float(np.median(ratios)) for role, ratios in self._ratios.items()}
            self._ratios = {}
            if any(abs(ratio - 1) > self.threshold for ratio in drift.values()):
                self._plan_again(self._costs, drift)

    def _plan_again(self, costs: MeasuredCosts, drift: Mapping[str, float]) -> None:
        drifted_costs = replace(costs, profile=_drifted(costs.profile, drift))
        choice = choose_placement(drifted_costs)
        now = next((each for each in choice.predictions if each.allocation == self._allocation), None)
        if now is None and self._allocation is not None:  # several encoders would share their ranks otherwise today
            now = drifted_costs.predict(self._allocation)
        if now is None or now.seconds <= choice.chosen.seconds * (1 + choice.margin):
            return
        self._costs = None  # once is enough
        drifted = " and ".join(f"the {role} takes {ratio:.2f} times" for role, ratio in sorted(drift.items()))
        rank_zero_warn(
            f"The allocation no longer fits: {drifted} as long as it was planned with. With these times "
            f"{choice.reason}.\n{text_table(*choice.rows())}\n  {self._advice(choice)}"
        )

    def _advice(self, choice: PlacementChoice[MeasuredPrediction]) -> str:
        path = Path(self._folder) / BETTER_ALLOCATION_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_plan(choice.chosen.allocation, path, f"By measured times, {choice.reason}.")
        except (AllocationError, OSError) as error:
            return (
                f"To switch, start again from a checkpoint with another allocation. It is not kept as a file: {error}"
            )
        return f"To switch, start again from a checkpoint with FlowTrainStrategy(allocation={str(path)!r})."


def _drifted(profile: Profile, drift: Mapping[str, float]) -> Profile:
    """The profile with costs of each half as many times as large."""
    roles = dict(profile.roles)
    for role, ratio in drift.items():
        cost = roles[role].cost
        scaled = CostModel(ratio * cost.linear, ratio * cost.quadratic, ratio * cost.constant)
        roles[role] = replace(roles[role], cost=scaled)
    return replace(profile, roles=roles)


def _seconds(cost: CostModel, tokens: float, squares: float) -> float:
    return cost.linear * tokens + cost.quadratic * squares + cost.constant
