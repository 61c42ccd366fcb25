"""Checkpoint directories: the halves by parameter name, in any layout; written all or not at all, and read if whole.

::

    last.ckpt/
        index.json                          what Lightning saves, less weights and optimizer states, and what flowtrain
                                            needs to resume; where each part of a tensor lies; digests of everything
        random_states.json                  the random states of every rank
        encoder/rank-00001.safetensors      what rank 1 wrote of the half: weights and optimizer states
        backbone/rank-00000.safetensors     the same of the other half
        objects.pt                          only where callbacks or hyperparameters hold what JSON cannot
"""

from flowtrain_lightning.checkpoint.export import FlowCheckpointIO, export_checkpoint, plain_file
from flowtrain_lightning.checkpoint.files import remove as remove_checkpoint
from flowtrain_lightning.checkpoint.index_file import DamagedCheckpointError
from flowtrain_lightning.checkpoint.loading import load_checkpoint, load_half, read_allocation, read_checkpoint
from flowtrain_lightning.checkpoint.local_shard import LocalShard
from flowtrain_lightning.checkpoint.saving import save_checkpoint

__all__ = [
    "DamagedCheckpointError",
    "FlowCheckpointIO",
    "LocalShard",
    "export_checkpoint",
    "load_checkpoint",
    "load_half",
    "plain_file",
    "read_allocation",
    "read_checkpoint",
    "remove_checkpoint",
    "save_checkpoint",
]
