"""Callbacks: progress, timeline, preemption."""

from flowtrain_lightning.callbacks.preemption import PreemptionCheckpoint
from flowtrain_lightning.callbacks.progress import FlowProgressBar
from flowtrain_lightning.callbacks.timeline import TimelineRecorder

__all__ = ["FlowProgressBar", "PreemptionCheckpoint", "TimelineRecorder"]
