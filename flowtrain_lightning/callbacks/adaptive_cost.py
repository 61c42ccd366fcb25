"""Lets the cost models that steps are packed by follow what the machine is measured to take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

from flowtrain_lightning.data import StepBatch, StepLoader
from flowtrain_lightning.data.steps.step_packing import CostChange
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import AdaptiveCost, Observation
from flowtrain_lightning.packing.role_graph import RoleGraph
from flowtrain_lightning.packing.step_work import STEPS_AHEAD
from flowtrain_lightning.runtime.rank_metrics import joined_timings
from flowtrain_lightning.runtime.runner import RoleRunner

_STEPS_BETWEEN = 5
"""Steps from one look at the measured times to the next."""
_REMEMBERED = 2
"""Looks whose times are fitted together."""
_UNKNOWN = CostModel(0.0, 0.0, 0.0)


class AdaptCosts(L.Callback):
    """Fits the cost models to measured microbatches and encoder batches while a run goes on.

    Every few steps each role's model is fitted to the times of all its ranks, in seconds. What is found holds from a
    later step on, which no rank or worker has planned yet: so many steps later as may be planned ahead. It decides how
    the samples of a step are packed, and never which these are. All ranks find the same; a checkpoint keeps it, so that
    a resumed run packs as before. The relative error of what a model predicted is logged under its role, such as
    ``encoder_cost_error``, and every change is written to ``cost_changes.json``, from which a run can be repeated.

    ``PackingConfig(cost=..., media_costs=...)``, where given, are in seconds then, and ``num_workers`` is the same on
    all ranks. Under plain Lightning nothing is measured; changes from a file take place there too.

    Args:
        replay: a ``cost_changes.json``: its changes take place in the same steps again, and nothing is measured.

    Attributes:
        changes: all changes so far, those that are still to come among them.
    """

    def __init__(self, replay: str | Path | None = None) -> None:
        self._repeated: list[CostChange] = []
        if replay is not None:
            self._repeated = [CostChange.from_state(change) for change in json.loads(Path(replay).read_text())]
        self._measures = replay is None
        self._folder = Path()
        self._runner: RoleRunner | None = None
        self._graph = RoleGraph(())
        self._begin()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begins anew with another Trainer; what a checkpoint has comes after this."""
        if isinstance(pl_module, FlowModule):
            self._graph = pl_module.role_graph
        if stage == "fit" and trainer.global_step == 0:
            self._begin()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tells the loader of changes so far, has times told, and begins with the cost models of the data module."""
        self._tell(trainer)  # here too: a run that goes on in mid-epoch starts no epoch
        self._runner = getattr(trainer.strategy, "runner", None)
        if self._runner is None or not self._measures:
            return
        self._runner.collects_timings = True
        self._folder = Path(trainer.strategy.broadcast(str(trainer.log_dir or trainer.default_root_dir)))
        if self._steps == 0:
            packing = _loader(trainer).steps.packing
            self._models[self._graph.trunk].cost = packing.cost
            for role, cost in packing.media_costs.items():
                self._models[role].cost = cost

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tells a new loader of changes so far."""
        self._tell(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Takes in the step's times, and every few steps changes the costs."""
        if self._runner is None or not self._measures:
            return
        for role, timings in joined_timings(note["timings"] for note in self._runner.report.notes).items():
            self._observed[role] += [Observation(*item) for item in timings]
        self._steps += 1
        if self._steps % _STEPS_BETWEEN == 0:
            self._look(trainer, batch)

    def state_dict(self) -> dict[str, Any]:
        """The state on which the next changes depend, and those so far; in JSON types."""
        return {
            "steps": self._steps,
            "models": {role: model.state_dict() for role, model in self._models.items()},
            "observed": {
                role: [[item.tokens, item.squares, item.seconds] for item in items]
                for role, items in self._observed.items()
            },
            "changes": [change.state_dict() for change in self.changes],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        if not self._measures:
            return
        self._steps = state_dict["steps"]
        for role, model in self._models.items():
            model.load_state_dict(state_dict["models"][role])
            self._observed[role] = [Observation(*item) for item in state_dict["observed"][role]]
        self.changes = [CostChange.from_state(change) for change in state_dict["changes"]]

    def _begin(self) -> None:
        self.changes = list(self._repeated)
        self._models: dict[str, AdaptiveCost] = {
            role: AdaptiveCost(_UNKNOWN, _REMEMBERED) for role in self._graph.roles
        }
        self._observed: dict[str, list[Observation]] = {role: [] for role in self._graph.roles}
        self._steps = 0

    def _tell(self, trainer: L.Trainer) -> None:
        """Tells the loader of changes that it does not know of, as it is a new one or as they are repeated."""
        for change in self.changes:
            loader = _loader(trainer)
            if change.position > max(
                [loader.sampler.planned, *(known.position for known in loader.sampler.changes[-1:])]
            ):
                loader.change_costs(change)

    def _look(self, trainer: L.Trainer, batch: StepBatch) -> None:
        errors = {}
        for role, model in self._models.items():
            if self._observed[role]:
                model.end_step(self._steps, self._observed[role])
                errors[f"{role}_cost_error"] = model.error
            self._observed[role] = []
        for logger in trainer.loggers:
            logger.log_metrics(errors, step=trainer.global_step - 1)  # beside the step's own loss, counted from 0
        loader = _loader(trainer)
        # Whoever works ahead asks for so many steps beyond this one, and the loader plans more beyond these.
        change = self._change(batch.epoch, batch.step + STEPS_AHEAD + loader.planned_ahead + 1)
        packing = loader.steps.packing
        former = self.changes[-1] if self.changes else CostChange(0, 0, packing.cost, packing.media_costs)
        if change == replace(former, epoch=change.epoch, step=change.step):
            return
        loader.change_costs(change)
        self.changes.append(change)
        if trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            changes = [each.state_dict() for each in self.changes]
            (self._folder / "cost_changes.json").write_text(json.dumps(changes, indent=1) + "\n")

    def _change(self, epoch: int, step: int) -> CostChange:
        """What is found so far, to hold from a step on."""
        found = {role: model.cost for role, model in self._models.items() if model.cost != _UNKNOWN}
        cost = found.pop(self._graph.trunk, _UNKNOWN)
        return CostChange(epoch, step, cost, found)


def _loader(trainer: L.Trainer) -> StepLoader:
    loader = trainer.train_dataloader
    if not isinstance(loader, StepLoader):
        raise TypeError(
            f"AdaptCosts changes the costs of a FlowDataModule's steps, but the training loader is a "
            f"{type(loader).__name__}. Pass `datamodule=FlowDataModule(...)`, or leave the callback out."
        )
    return loader
