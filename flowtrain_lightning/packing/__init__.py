"""Samples to balanced microbatches and encoder batches: pure functions on numpy arrays, without torch."""

from flowtrain_lightning.packing.cost import DEFAULT_COST, CostModel
from flowtrain_lightning.packing.errors import PackingError
from flowtrain_lightning.packing.plan import Entry, IntArray, SampleSizes, StepPlan
from flowtrain_lightning.packing.step import plan_step

__all__ = ["DEFAULT_COST", "CostModel", "Entry", "IntArray", "PackingError", "SampleSizes", "StepPlan", "plan_step"]
