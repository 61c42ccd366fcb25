"""A module whose encoder returns rows of another type on each rank, and what the ranks of a run say of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.data import steps_data
from tests.exactness.layouts import trainer_for
from tests.forks import write_down
from tests.tiny import TinyVLM


class Varying(TinyVLM):
    """Returns fewer digits on one of its encoder ranks."""

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        (rows,) = super().encode(media)
        return (rows.to(torch.bfloat16) if self.training and self.trainer.global_rank == 2 else rows,)


def train(folder: Path, *, data: str) -> None:
    """Trains a step; writes down the error of this rank."""
    trainer = trainer_for("2+1", max_steps=1, limit_val_batches=0, default_root_dir=folder)
    said = ""
    try:
        trainer.fit(Varying(), datamodule=steps_data(Path(data)))
    except ValueError as error:
        said = str(error)
    write_down(folder, said)
    disconnect_groups()
