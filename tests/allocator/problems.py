"""Problems of planning that tests share."""

from __future__ import annotations

from flowtrain_lightning.allocator import DEVICES, Cluster, named_model, role_problems, typical_workload


def problems(model="qwen2.5-vl-7b", devices=8, device="h100", frozen=(), precision="bf16-mixed", **settings):
    """Role -> its problem, for a public model on typical data."""
    module = named_model(model).with_frozen(*frozen)
    workload = typical_workload(module, **settings)
    chosen = DEVICES[device]
    return role_problems(module, workload, Cluster(chosen, devices, chosen.per_node), precision)
