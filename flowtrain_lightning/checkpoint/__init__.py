"""Checkpoint directories: one folder per role, by parameter name, plus a meta file; written all or not at all.

::

    last.ckpt/
        meta.pt             what Lightning saves, less weights and optimizer state; what flowtrain needs to resume
        random_states.pt    the random states of every rank
        encoder/            weights and optimizer state of the half, see `tensors`; values.pt: what is no tensor
        backbone/           likewise
"""

from flowtrain_lightning.checkpoint.directory import load_checkpoint, read_allocation, read_checkpoint, save_checkpoint
from flowtrain_lightning.checkpoint.names import remove as remove_checkpoint
from flowtrain_lightning.checkpoint.plain import FlowCheckpointIO, export_checkpoint, plain_file

__all__ = [
    "FlowCheckpointIO",
    "export_checkpoint",
    "load_checkpoint",
    "plain_file",
    "read_allocation",
    "read_checkpoint",
    "remove_checkpoint",
    "save_checkpoint",
]
