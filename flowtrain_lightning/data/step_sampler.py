"""Which steps a loader reads, and with which costs each of them is planned."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import SequentialSampler

from flowtrain_lightning.data.planning import CostChange, PackingConfig
from flowtrain_lightning.data.steps import StepDataset


class StepSampler(SequentialSampler):
    """Where the loader is: the epoch that Lightning sets, the step at which it is entered, and costs that hold there.

    Steps come in sequence, shuffled or not: what is shuffled is which samples they have.

    Attributes:
        steps: the steps.
        epoch: the one that the next iterator reads.
        first: the step at which it begins.
        planned: epoch and number of the step that was handed out last.
        changes: costs that take the place of those in ``steps.planning``, each from its step on, in order.
    """

    def __init__(self, steps: StepDataset) -> None:
        super().__init__(steps)
        self.steps = steps
        self.epoch = 0
        self.first = 0
        self.planned = (0, -1)
        self.changes: list[CostChange] = []

    def set_epoch(self, epoch: int) -> None:
        """The next iterator that starts will read this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, int, PackingConfig]]:  # type: ignore[override]
        return self._places(self.epoch, self.first)

    def _places(self, epoch: int, first: int) -> Iterator[tuple[int, int, PackingConfig]]:
        for step in range(first, len(self.steps)):
            self.planned = (epoch, step)
            yield epoch, step, self._planning(epoch, step)

    def _planning(self, epoch: int, step: int) -> PackingConfig:
        held = [change for change in self.changes if change.place <= (epoch, step)]
        return self.steps.planning.with_costs(held[-1]) if held else self.steps.planning
