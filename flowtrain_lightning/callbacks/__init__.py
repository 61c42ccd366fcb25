"""Callbacks: progress, monitor, timeline, profiler, evaluation, averages of weights, costs and plans that adapt."""

from flowtrain_lightning.callbacks.adaptive_cost import AdaptCosts
from flowtrain_lightning.callbacks.answer_evaluation import EvaluateAnswers
from flowtrain_lightning.callbacks.monitor import FlowMonitor
from flowtrain_lightning.callbacks.progress import FlowProgressBar
from flowtrain_lightning.callbacks.replan import FlowReplan
from flowtrain_lightning.callbacks.step_profiler import StepProfiler
from flowtrain_lightning.callbacks.timeline_recorder import TimelineRecorder
from flowtrain_lightning.callbacks.weight_averages import AverageWeights

__all__ = [
    "AdaptCosts",
    "AverageWeights",
    "EvaluateAnswers",
    "FlowMonitor",
    "FlowProgressBar",
    "FlowReplan",
    "StepProfiler",
    "TimelineRecorder",
]
