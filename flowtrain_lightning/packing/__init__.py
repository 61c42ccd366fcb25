"""Packing: samples into microbatches balanced by cost. Pure functions on numpy arrays."""

from flowtrain_lightning.packing.plan import Entry, IntArray, SampleSizes, StepPlan

__all__ = ["Entry", "IntArray", "SampleSizes", "StepPlan"]
