"""Parallel: process groups, and what puts a layout onto a half of a module."""

from flowtrain_lightning.parallel.engine import HalfEngine
from flowtrain_lightning.parallel.gradients import clip_to_norm, clip_to_value, local_part, squared_norm
from flowtrain_lightning.parallel.replicate import ReplicatedHalf, broadcast_half
from flowtrain_lightning.parallel.tensor_plan import TensorPlan, TensorStyle

__all__ = [
    "HalfEngine",
    "ReplicatedHalf",
    "TensorPlan",
    "TensorStyle",
    "broadcast_half",
    "clip_to_norm",
    "clip_to_value",
    "local_part",
    "squared_norm",
]
