"""How fast a run is and why: torchmetrics of throughput, of the use of devices, and of packing."""

from flowtrain_lightning.metrics.flop_utilization import FlopUtilization
from flowtrain_lightning.metrics.packing_use import PackingUse
from flowtrain_lightning.metrics.plan_metric import PlanMetric
from flowtrain_lightning.metrics.throughput import Throughput

__all__ = ["FlopUtilization", "PackingUse", "PlanMetric", "Throughput"]
