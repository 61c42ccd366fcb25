"""A module that logs in `merge`, and what each rank of a run has of it at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.data import steps_data
from tests.exactness.layouts import trainer_for
from tests.exactness.modules import FourDivided
from tests.forks import write_down
from tests.tiny import WIDTH, CharTokenizer


class Merging(FourDivided):
    """Logs means over target tokens: of their places, or of how large they are embedded."""

    def __init__(self, of_weights: bool) -> None:
        super().__init__()
        self.of_weights = of_weights

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.head = nn.Linear(WIDTH, CharTokenizer.vocabulary)  # so that the embedding is on the first stage

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        merged, targets = super().merge(batch, features), batch.labels != IGNORED_LABEL
        logged = merged["x"].detach().square() if self.of_weights else batch.position_ids.double()
        self.log("merged", logged[targets].mean())
        return merged


def train(folder: Path, *, data: str, layout: str, roles: dict[str, Any], of_weights: bool) -> None:
    """Trains two steps, and writes down what was logged last, or the error."""
    trainer = trainer_for(
        layout,
        strategy={"roles": roles},
        max_steps=2,
        limit_val_batches=0,
        precision="64-true",
        default_root_dir=folder,
    )
    try:
        trainer.fit(Merging(of_weights), datamodule=steps_data(Path(data)))
        said = str(float(trainer.callback_metrics["merged"]))
    except ValueError as error:
        said = str(error)
    write_down(folder, said)
    disconnect_groups()
