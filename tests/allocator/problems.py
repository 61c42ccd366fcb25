"""Problems of planning that tests share."""

from __future__ import annotations

from flowtrain_lightning.allocator.devices import DEVICES, Cluster
from flowtrain_lightning.allocator.models import named_model
from flowtrain_lightning.allocator.problem import role_problems
from flowtrain_lightning.allocator.workload import typical_workload


def problems(model="qwen2.5-vl-7b", devices=8, device="h100", frozen=(), precision="bf16-mixed", **settings):
    """Role -> its problem, for a public model on typical data."""
    module = named_model(model).with_frozen(*frozen)
    workload = typical_workload(module, **settings)
    chosen = DEVICES[device]
    return role_problems(module, workload, Cluster(chosen, devices, chosen.per_node), precision)
