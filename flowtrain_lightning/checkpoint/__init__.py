"""Checkpoint directories: one folder per role, by parameter name, plus a meta file; written all or not at all.

::

    last.ckpt/
        meta.pt             what Lightning saves, less weights and optimizer state; what flowtrain needs to resume
        random_states.pt    the random states of every rank
        encoder/            weights and optimizer state of the half, see `tensors`; values.pt: what is no tensor
        backbone/           the same for the other half
"""

from flowtrain_lightning.checkpoint.checkpoint import (
    load_checkpoint,
    load_half,
    read_allocation,
    read_checkpoint,
    save_checkpoint,
)
from flowtrain_lightning.checkpoint.export import FlowCheckpointIO, export_checkpoint, plain_file
from flowtrain_lightning.checkpoint.files import remove as remove_checkpoint

__all__ = [
    "FlowCheckpointIO",
    "export_checkpoint",
    "load_checkpoint",
    "load_half",
    "plain_file",
    "read_allocation",
    "read_checkpoint",
    "remove_checkpoint",
    "save_checkpoint",
]
