"""Planning an allocation from measured costs: candidates are played, and the best is chosen."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.data.dataset import StepDataset
from flowtrain_lightning.packing import PackingError
from flowtrain_lightning.placement.choice import Choice, choose
from flowtrain_lightning.placement.prediction import Prediction, Processors, predict
from flowtrain_lightning.placement.steps import plan_steps
from flowtrain_lightning.profiling import Profile

PLAYED_STEPS = 6
"""So many steps tell how uneven ranks are, and how far an encoder that does not train works ahead."""


@dataclass(frozen=True)
class Planner:
    """Everything that an allocation is planned by, but for what the halves cost.

    Attributes:
        steps: of the training data.
        ranks: of the run, at least 2.
        processors: which of the ranks share what they compute on.
        kept_batches: encoder batches whose activations each encoder rank keeps.
        nodes: on which the ranks run, as many on each.
    """

    steps: StepDataset
    ranks: int
    processors: Processors
    kept_batches: int
    nodes: int = 1

    def choose(self, profile: Profile) -> Choice:
        """Compare allocations by playing the first steps with these costs.

        Raises:
            ValueError: the steps cannot be dealt to so many ranks.
        """

        def predicted(allocation: Allocation) -> Prediction | None:
            if allocation.placement == "colocated" and not profile.whole:
                return None  # both halves did not fit on a device together
            try:
                plans = plan_steps(self.steps, allocation, PLAYED_STEPS)
            except PackingError:
                return None  # microbatches=... cannot be shared out evenly among these backbone ranks
            return predict(plans, allocation, profile, self.processors, self.kept_batches)

        return choose(self.ranks, predicted, self.nodes)


def processors_of(device: torch.device, ranks: int, ranks_per_device: int, nodes: int = 1) -> Processors:
    """What the ranks compute on: all those of a node share its CPU, or those of a device share that."""
    on_cpu = device.type == "cpu"
    together = ranks // nodes if on_cpu else ranks_per_device
    capacity = len(os.sched_getaffinity(0)) / torch.get_num_threads() if on_cpu else 1.0
    return Processors(tuple(tuple(range(first, first + together)) for first in range(0, ranks, together)), capacity)
