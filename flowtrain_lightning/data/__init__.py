"""Data: samples, media, packed batches, metadata sources, readers and the data module."""

from flowtrain_lightning.data.batch import IGNORED_LABEL, PackedBatch, PackedMedia, StepBatch, StepPart
from flowtrain_lightning.packing import Entry, StepPlan

__all__ = ["IGNORED_LABEL", "Entry", "PackedBatch", "PackedMedia", "StepBatch", "StepPart", "StepPlan"]
