"""Callbacks: progress and timeline."""

from flowtrain_lightning.callbacks.progress import FlowProgressBar
from flowtrain_lightning.callbacks.timeline import TimelineRecorder

__all__ = ["FlowProgressBar", "TimelineRecorder"]
