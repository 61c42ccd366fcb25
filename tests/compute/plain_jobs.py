"""What ranks do in the tests of plain Lightning: train under DDP after flowtrain, in one script."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from flowtrain_lightning.parallel.connecting import disconnect_groups
from tests.exactness.data import steps_data
from tests.exactness.layouts import trainer_for
from tests.forks import write_down
from tests.tiny import TinyVLM


def ddp_after_flowtrain(folder: Path, *, data: str) -> None:
    """Writes what DDP says to the groups of roles, and what it trains once these are left."""

    def fit(layout: str) -> TinyVLM:
        module = TinyVLM()
        trainer = trainer_for(layout, max_steps=2, limit_val_batches=0, default_root_dir=folder)
        trainer.fit(module, datamodule=steps_data(Path(data)))
        return module

    told = ""
    fit("1+1")
    try:
        fit("ddp 2")
    except RuntimeError as error:
        told = str(error)
    dist.destroy_process_group()
    module = fit("ddp 2")
    weights = [float(parameter.double().abs().sum()) for parameter in module.parameters()]
    write_down(folder, {"told": told, "ranks": dist.get_world_size(), "weights": weights})
    dist.destroy_process_group()
    disconnect_groups()
