"""From a role's layout to the engine that puts it onto the role's half of a module."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.allocator.allocation import Offload, Recompute
from flowtrain_lightning.parallel.blocks import recompute_in_backward, repeated_blocks
from flowtrain_lightning.parallel.context_parallel import ContextParallelHalf
from flowtrain_lightning.parallel.engine import HalfEngine
from flowtrain_lightning.parallel.fully_shard import FullyShardedHalf
from flowtrain_lightning.parallel.groups import Groups
from flowtrain_lightning.parallel.halves import HalvedModule, half_parameters
from flowtrain_lightning.parallel.offloading import ActivationsOnHost
from flowtrain_lightning.parallel.replicate import ReplicatedHalf
from flowtrain_lightning.parallel.tensor_parallel import TensorParallelHalf
from flowtrain_lightning.parallel.tensor_plan import divide_layers
from flowtrain_lightning.ports import shut_at_the_end

_PRECISION = {
    "bf16-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16-true": MixedPrecisionPolicy(reduce_dtype=torch.float32),
}
"""The Trainer's precision -> what FSDP2 gathers and sums in; elsewhere all is in the dtype of the weights."""


def make_engine(
    module: HalvedModule,
    role: str,
    layout: Layout,
    groups: Groups,
    *,
    recompute: Recompute,
    offload: Offload,
    device_type: str,
    precision: str,
    shares_ranks: bool,
    fill: Callable[[], None],
) -> HalfEngine:
    """Put a layout onto one half of a module.

    Context ranks of a data-parallel rank hold the same weights and see other tokens, so that weights are sharded, and
    gradients summed, over both alike.

    Args:
        module: its half of this role is here; its weights are equal on all ranks of the role, or have no memory yet.
        role: whose half it is.
        layout: whole copies or FSDP2 over data-parallel ranks, with any tensor and context degree.
        groups: of the calling rank.
        recompute: what of every repeated block backwards compute again.
        offload: what lies in host memory.
        device_type: on which it computes, for example ``"cuda"``.
        precision: of the Trainer.
        shares_ranks: the other role has the same ranks.
        fill: gives weights that have no memory their numbers, whole or in parts.

    Raises:
        ValueError: the module does not say how the half is divided among tensor ranks, or says what cannot be.
    """
    on_host = ActivationsOnHost(pinned=device_type != "cpu") if offload in ("activations", "all") else None
    modules = {path: module.get_submodule(path) for path in module.halves[role]}
    mesh = _mesh(layout, device_type) if layout.shard == "fsdp" or layout.tensor > 1 else None
    summed = []
    if layout.tensor > 1:
        assert mesh is not None
        summed = divide_layers(modules, module.tensor_plan(role, layout.tensor), mesh["tensor"])
    engine: HalfEngine
    if layout.shard == "replicate":
        for block in (block for half in modules.values() for block in repeated_blocks(half)):
            recompute_in_backward(block, recompute)
        # Sums of two roles on one GPU, in communicators of their own, could wait for each other.
        early = groups.role_cpu is None or not shares_ranks
        fill()
        # No mesh of one dimension: it would be the default group, in which early sums could meet other collectives.
        group = groups.of_role(role) if mesh is None else mesh.get_group("data")
        engine = ReplicatedHalf(half_parameters(module, role), group, early=early, activations=on_host)
    else:
        assert mesh is not None
        engine = FullyShardedHalf(
            modules,
            mesh["replica", "shard"] if layout.replicas > 1 else mesh["shard"],
            wrap=getattr(module, f"parallelize_{role}"),
            fill=fill,
            precision=_PRECISION.get(precision),
            recompute=recompute,
            offload_parameters=offload in ("weights", "all"),
            activations=on_host,
        )
    if layout.tensor > 1:
        assert mesh is not None
        engine = TensorParallelHalf(engine, summed, mesh.get_group("tensor"))
    if layout.context > 1:
        engine = ContextParallelHalf(engine, _context_group(layout, device_type))
    return engine


def _mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The ranks of the role, which are the default group: those that see other tokens, then neighbours of a layer."""
    data = {"data": layout.data * layout.context}
    if layout.shard == "fsdp":
        replicas = {"replica": layout.replicas} if layout.replicas > 1 else {}
        data = {**replicas, "shard": layout.data // layout.replicas * layout.context}
    sizes = {**data, **({"tensor": layout.tensor} if layout.tensor > 1 else {})}
    with shut_at_the_end():
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _context_group(layout: Layout, device_type: str) -> dist.ProcessGroup:
    """The ranks that share this one's sequences, and have the same share of every layer."""
    shape = (layout.data, layout.context, layout.tensor)
    with shut_at_the_end():
        return init_device_mesh(device_type, shape, mesh_dim_names=("data", "context", "tensor")).get_group("context")
