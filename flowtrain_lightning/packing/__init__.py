"""Sizes of samples to balanced microbatches and encoder batches: pure functions on numpy arrays, without torch.

Three ways in: :func:`~flowtrain_lightning.packing.step_planner.plan_step` plans a step whose samples are known,
:class:`~flowtrain_lightning.packing.stream_packer.StreamPacker` cuts a stream of samples into steps, and
:func:`~flowtrain_lightning.packing.offline.pack_offline` packs a whole data set. What is named here imports quickly.
"""

from flowtrain_lightning.packing.cost_model import DEFAULT_COST, CostModel
from flowtrain_lightning.packing.step_plan import (
    AUDIO,
    IMAGE,
    SYNC_EVERY,
    Entry,
    IntArray,
    NameArray,
    PackingError,
    SampleSizes,
    StepPlan,
    SyncEvery,
)

__all__ = [
    "AUDIO",
    "DEFAULT_COST",
    "IMAGE",
    "SYNC_EVERY",
    "CostModel",
    "Entry",
    "IntArray",
    "NameArray",
    "PackingError",
    "SampleSizes",
    "StepPlan",
    "SyncEvery",
]
