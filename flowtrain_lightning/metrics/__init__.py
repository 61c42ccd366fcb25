"""Torchmetrics: how fast a run is and why, and how near generated answers come to the true ones."""

from flowtrain_lightning.metrics.answers import AnswerExactMatch, AnswerMetric, AnswerSimilarity
from flowtrain_lightning.metrics.plan_metrics import FlopUtilization, PackingUse, PlanMetric, Throughput

__all__ = [
    "AnswerExactMatch",
    "AnswerMetric",
    "AnswerSimilarity",
    "FlopUtilization",
    "PackingUse",
    "PlanMetric",
    "Throughput",
]
