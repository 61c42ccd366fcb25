"""How nodes may not differ: refused before the first step, in sentences that say what to do."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import lightning as L
import torch

from flowtrain_lightning.checkpoint.files import refuse_unshared_folder
from flowtrain_lightning.data import DataError, FlowDataModule
from flowtrain_lightning.parallel.cross_group import CrossGroup


def refuse_unmet_nodes(trainer: L.Trainer) -> None:
    """Raises where a script that was started by hand on each node does not know how to find the other nodes.

    Raises:
        ValueError: names the variables that are missing, and what to do.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
    if trainer.num_nodes > 1 and missing:
        raise ValueError(
            f"Trainer(num_nodes={trainer.num_nodes}) was given, but the environment has no {' and no '.join(missing)}, "
            "so this process cannot find those of the other nodes. Start the script on every node with the address "
            "and a free port of node 0, and with the node's number from 0, or by torchrun or SLURM's srun."
        )


def refuse_unlike_nodes(trainer: L.Trainer, cross: CrossGroup) -> None:
    """Raises on every rank where nodes have other data, or folders of their own for checkpoints. All ranks call it.

    Raises:
        DataError: names the ranks whose data differ from those of rank 0.
        FileNotFoundError: names the folder and the ranks that do not see it.
    """
    _refuse_other_data(trainer, cross)
    if trainer.training:  # the checkpoint of a later step would be too late to notice
        callbacks = trainer.checkpoint_callbacks  # type: ignore[attr-defined]
        folders = {str(getattr(callback, "dirpath", None) or "") for callback in callbacks}
        for folder in sorted(folder for folder in folders if folder and "://" not in folder):
            refuse_unshared_folder(Path(folder), cross)


def _refuse_other_data(trainer: L.Trainer, cross: CrossGroup) -> None:
    data = trainer.datamodule  # type: ignore[attr-defined]
    stage = trainer.state.fn
    if stage is None or not isinstance(data, FlowDataModule):
        return
    content = hashlib.sha256(data.fingerprint(stage.value).encode()).digest()
    contents = torch.zeros(cross.ranks, dtype=torch.int64)
    contents[cross.rank] = int.from_bytes(content[:7], "big")
    others = (cross.all_reduce(contents) != contents[0]).nonzero().flatten().tolist()
    if others:
        raise DataError(
            f"{'Rank' if len(others) == 1 else 'Ranks'} {', '.join(map(str, others))} would read other data than rank "
            "0: the files of that name differ between the nodes, and so would the steps that the ranks plan. Put the "
            "same files onto every node, or onto a file system that all nodes share."
        )
