"""Torchmetrics: how fast a run is and why, and how near generated answers come to the true ones."""

from flowtrain_lightning.metrics.answers import AnswerExactMatch, AnswerMetric, AnswerSimilarity
from flowtrain_lightning.metrics.flop_utilization import FlopUtilization
from flowtrain_lightning.metrics.packing_use import PackingUse
from flowtrain_lightning.metrics.plan_metric import PlanMetric
from flowtrain_lightning.metrics.throughput import Throughput

__all__ = [
    "AnswerExactMatch",
    "AnswerMetric",
    "AnswerSimilarity",
    "FlopUtilization",
    "PackingUse",
    "PlanMetric",
    "Throughput",
]
