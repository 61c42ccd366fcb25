"""From a role's layout to the engine that puts it onto the role's half of a module."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.allocator.allocation import Recompute
from flowtrain_lightning.parallel.blocks import recompute_in_backward, repeated_blocks
from flowtrain_lightning.parallel.engine import HalfEngine
from flowtrain_lightning.parallel.fully_shard import FullyShardedHalf
from flowtrain_lightning.parallel.groups import Groups
from flowtrain_lightning.parallel.halves import HalvedModule, half_parameters
from flowtrain_lightning.parallel.replicate import ReplicatedHalf

_PRECISION = {
    "bf16-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16-true": MixedPrecisionPolicy(reduce_dtype=torch.float32),
}
"""The Trainer's precision -> what FSDP2 gathers and sums in; elsewhere all is in the dtype of the weights."""


def make_engine(
    module: HalvedModule,
    role: str,
    layout: Layout,
    recompute: Recompute,
    groups: Groups,
    *,
    device_type: str,
    precision: str,
    shares_ranks: bool,
) -> HalfEngine:
    """Put a layout onto one half of a module, whose weights are equal on all ranks of the role.

    Args:
        module: its half of this role is here.
        role: whose half it is.
        layout: whole copies, or FSDP2.
        recompute: what of every repeated block backwards compute again.
        groups: of the calling rank.
        device_type: on which it computes, for example ``"cuda"``.
        precision: of the Trainer.
        shares_ranks: the other role has the same ranks.
    """
    modules = {path: module.get_submodule(path) for path in module.halves[role]}
    if not layout.shares_weights:
        for block in (block for half in modules.values() for block in repeated_blocks(half)):
            recompute_in_backward(block, recompute)
        # Sums of two roles on one GPU, in communicators of their own, could wait for each other.
        early = groups.role_cpu is None or not shares_ranks
        return ReplicatedHalf(half_parameters(module, role), groups.of_role(role), early=early)
    return FullyShardedHalf(
        modules,
        _mesh(layout, device_type),
        precision=_PRECISION.get(precision),
        recompute=recompute,
    )


def _mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The ranks of the role: a line for FSDP2, groups of neighbours for HSDP."""
    if layout.replicas == 1:
        return init_device_mesh(device_type, (layout.data,), mesh_dim_names=("shard",))
    shape = (layout.replicas, layout.data // layout.replicas)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replica", "shard"))
