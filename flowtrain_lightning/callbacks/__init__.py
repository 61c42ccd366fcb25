"""Callbacks: progress, timeline and costs that adapt."""

from flowtrain_lightning.callbacks.adaptive_cost import AdaptCosts
from flowtrain_lightning.callbacks.progress import FlowProgressBar
from flowtrain_lightning.callbacks.timeline import TimelineRecorder

__all__ = ["AdaptCosts", "FlowProgressBar", "TimelineRecorder"]
