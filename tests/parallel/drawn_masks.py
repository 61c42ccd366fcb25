"""A module with dropout between blocks, and the masks and numbers that each rank of a run draws."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowtrain_lightning.data import PackedBatch
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.data import steps_data
from tests.exactness.layouts import trainer_for
from tests.exactness.modules import Divided, DividedBackbone
from tests.forks import write_down


class DroppingBackbone(DividedBackbone):
    """What it is given is dropped in part."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.masks: list[list[bool]] = []
        self.decided: list[float] = []

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        if self.training:
            self.masks.append((self.dropout(torch.ones_like(x)) == 0).flatten().tolist())
            self.decided += [float(np.random.random()), random.random()]
        return super().forward(self.dropout(x), position_ids, cu_seqlens, max_seqlen)


class Dropping(Divided):
    """Notes what it draws; before tokens are shared, it draws for all of them."""

    couples = ("random",)

    def configure_backbone(self) -> None:
        self.backbone = DroppingBackbone()
        self.merged: list[float] = []

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        if self.training:
            self.merged.append(float(torch.rand(())))
        return super().merge(batch, features)


def train(folder: Path, *, data: str, layout: str, roles: dict[str, Any]) -> None:
    """Trains two steps, and writes down what each rank of the backbone has drawn."""
    trainer = trainer_for(layout, strategy={"roles": roles}, max_steps=2, limit_val_batches=0, default_root_dir=folder)
    module = Dropping()
    trainer.fit(module, datamodule=steps_data(Path(data)))
    backbone = module.backbone
    found = {"masks": [], "decided": [], "merged": []}
    if isinstance(backbone, DroppingBackbone):
        found = {"masks": backbone.masks, "decided": backbone.decided, "merged": module.merged}
    write_down(folder, found)
    disconnect_groups()
