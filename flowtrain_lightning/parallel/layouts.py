"""From a role's layout to the engine that puts it onto the role's half of a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.allocator.role_layout import Offload, Recompute
from flowtrain_lightning.parallel.blocks import recompute_in_backward, repeated_blocks
from flowtrain_lightning.parallel.context_parallel import ContextParallelHalf
from flowtrain_lightning.parallel.deepspeed.deepspeed_engine import Stage
from flowtrain_lightning.parallel.deepspeed.deepspeed_half import DeepSpeedHalf
from flowtrain_lightning.parallel.deepspeed.deepspeed_shards import DeepSpeedShardedHalf
from flowtrain_lightning.parallel.engine import HalfEngine
from flowtrain_lightning.parallel.experts.expert_parallel import (
    EXPERT,
    ExpertParallelHalf,
    divide_adapters,
    divide_experts,
    experts_of,
    shard_experts,
)
from flowtrain_lightning.parallel.experts.tokens_of_experts import divide_tokens_of_experts
from flowtrain_lightning.parallel.fully_shard import FullyShardedHalf, shard_repeated_blocks
from flowtrain_lightning.parallel.halves import HalvedModule, absent_parameters, held_parameters
from flowtrain_lightning.parallel.offloading import ActivationsOnHost
from flowtrain_lightning.parallel.ranks.groups import Groups
from flowtrain_lightning.parallel.replicate import ReplicatedHalf
from flowtrain_lightning.parallel.stages.staged_half import StagedHalf
from flowtrain_lightning.parallel.tensor_parallel import TensorParallelHalf
from flowtrain_lightning.parallel.tensor_plan import divide_layers
from flowtrain_lightning.ports import shut_at_the_end

_PRECISION = {
    "bf16-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16-true": MixedPrecisionPolicy(reduce_dtype=torch.float32),
}
"""The Trainer's precision -> what FSDP2 gathers and sums in; elsewhere all is in the dtype of the weights."""

Fill = Callable[[Callable[[nn.Parameter], None] | None], None]
"""Gives weights without memory their numbers, whole or in parts, and calls its argument with each that has got them."""


@dataclass(frozen=True)
class RoleGroups:
    """The groups in which the ranks of one role compute with its half, and sum its gradients.

    Attributes:
        all: those that hold the same layers, where they do not meet in the mesh or are only some of the default group;
            None is the default group.
        mesh: of its ranks as `_mesh` arranges them; None for whole copies without tensor ranks.
        replicas: the ranks that hold the same shards in other shard groups, where these are summed after the last
            backward and not during it.
        context: the ranks that share sequences, where ranks do.
        experts: the same ranks as ``mesh``, those that share experts in the last dimension; None where none do. Tensor
            ranks do: each has tokens of its own there, so that experts are divided among them as among data ranks.
        column: the ranks of all stages that compute on the same samples with the same share of every layer; None
            without stages.
        ends: those of the first and the last stage among them; None on other stages, and without stages.
    """

    all: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    replicas: dist.ProcessGroup | None
    context: dist.ProcessGroup | None
    experts: DeviceMesh | None
    column: dist.ProcessGroup | None = None
    ends: dist.ProcessGroup | None = None


def make_groups(
    role: str, layout: Layout, groups: Groups, device_type: str, *, waits_for_others: bool, has_experts: bool
) -> RoleGroups:
    """Makes the groups of a role. Every rank of the default group calls it, for the same roles in the same order.

    Args:
        role: which one.
        layout: see `make_engine`.
        groups: of the calling rank.
        device_type: see `make_engine`.
        waits_for_others: some shard groups of the role are done when others are, others long before: a sum over them
            inside of a backward would wait for what the same ranks have yet to do.
        has_experts: the role's half has mixtures of experts, which ranks can share.
    """
    ranks = groups.ranks_of(role)
    own = groups.role_rank in ranks
    if layout.pipeline > 1:
        return _stage_groups(role, layout, groups, device_type)
    mesh = _mesh(layout, ranks, device_type) if layout.shard == "fsdp" or layout.tensor > 1 else None
    sums_late = own and mesh is not None and waits_for_others and layout.replicas > 1
    return RoleGroups(
        all=groups.of_role(role) if mesh is None or len(ranks) < groups.role_ranks else None,
        mesh=mesh,
        replicas=mesh.get_group("replica") if sums_late and mesh is not None else None,
        context=_context_group(layout, ranks, device_type, own) if layout.context > 1 else None,
        experts=_expert_mesh(layout, ranks, device_type) if has_experts and layout.expert_ranks > 1 else None,
    )


def _stage_groups(role: str, layout: Layout, groups: Groups, device_type: str) -> RoleGroups:
    """The groups of a role in stages, of which each has a mesh and a group of its own."""
    ranks = groups.ranks_of(role)
    own = groups.role_rank in ranks
    mesh, arranged = _mesh(layout, ranks, device_type), torch.tensor(ranks).view(layout.pipeline, -1)
    ends = None
    with shut_at_the_end():
        for first, last in zip(arranged[0].tolist(), arranged[-1].tolist(), strict=True):
            pair = dist.new_group([first, last])
            ends = pair if groups.role_rank in (first, last) else ends
    names = mesh.mesh_dim_names
    assert names is not None
    return RoleGroups(
        all=groups.of_role(role, layout.pipeline),
        mesh=mesh[names[1:]] if own else mesh,
        replicas=None,
        context=_context_group(layout, ranks, device_type, own) if layout.context > 1 else None,
        experts=None,
        column=mesh.get_group(names[0]) if own else None,
        ends=ends,
    )


def make_engine(
    module: HalvedModule,
    role: str,
    layout: Layout,
    groups: RoleGroups,
    *,
    recompute: Recompute,
    offload: Offload,
    device_type: str,
    precision: str,
    early: bool,
    fill: Fill,
) -> HalfEngine:
    """Put a layout onto one half of a module.

    Context ranks of a data-parallel rank hold the same weights and see other tokens, so that weights are sharded, and
    gradients summed, over both alike.

    Args:
        module: its half of this role is here; its weights are equal on all ranks of the role, or have no memory yet.
        role: whose half it is.
        layout: whole copies or FSDP2 over data-parallel ranks, with any tensor and context degree, or ZeRO of
            DeepSpeed.
        groups: of the role.
        recompute: what of every repeated block backwards compute again.
        offload: what lies in host memory.
        device_type: on which it computes, for example ``"cuda"``.
        precision: of the Trainer.
        early: whole copies may sum gradients during the last backward. A GPU of both roles must not wait in a sum while
            others need features or gradients of it: what waits for the whole GPU would keep these back. It sums when
            `HalfEngine.send_gradients` is called.
        fill: fills the weights of the half.

    Raises:
        ValueError: the module does not say how the half is divided among tensor ranks, or says what cannot be.
    """
    on_host = ActivationsOnHost(pinned=device_type != "cpu") if offload in ("activations", "all") else None
    modules = {path: module.get_submodule(path) for path in module.halves[role]}
    mesh, stage = groups.mesh, module.held_stages.get(role) if layout.pipeline > 1 else None
    experts = [] if groups.experts is None else experts_of(modules.values())
    if groups.experts is not None:
        divide_adapters(modules.values(), groups.experts)
        divide_experts(experts, groups.experts[EXPERT] if layout.shard == "fsdp" else groups.experts)
    summed = _divide_layers(module, role, layout, groups, modules, experts) if layout.tensor > 1 else []
    engine: HalfEngine
    if layout.shard != "fsdp":
        for block in (block for half in modules.values() for block in repeated_blocks(half)):
            recompute_in_backward(block, recompute)
    if layout.by_deepspeed:
        engine = _deepspeed_half(modules, layout, groups, on_host, offload == "optimizer", device_type, fill)
    elif layout.shard == "replicate":
        fill(None)
        # No mesh of one dimension: it would be the default group, in which early sums could meet other collectives.
        group = groups.all if mesh is None else mesh.get_group("data")
        if groups.experts is None:
            engine = ReplicatedHalf(held_parameters(module, role), group, early=early, activations=on_host)
        else:
            copies = groups.experts.get_group("replica")
            engine = _expert_half(held_parameters(module, role), experts, group, copies, on_host)
    else:
        assert mesh is not None
        dims = ("replica", "shard") if layout.replicas > 1 and groups.replicas is None else ("shard",)
        wrap = getattr(module, f"parallelize_{role}", partial(shard_repeated_blocks, list(modules.values())))

        def wrap_experts_too(*args: Any, **settings: Any) -> None:
            if groups.experts is not None:
                shard_experts(experts, groups.experts[dims], **settings)
            wrap(*args, **settings)

        engine = FullyShardedHalf(
            modules,
            mesh[dims],
            replicas=groups.replicas,
            wrap=wrap_experts_too,
            fill=partial(fill, None),
            absent=absent_parameters(module, role),
            precision=_PRECISION.get(precision),
            recompute=recompute,
            offload_parameters=offload in ("weights", "all"),
            activations=on_host,
        )
    if stage is not None:
        assert groups.column is not None
        held = dict(module.named_parameters())
        ties = [held[name] for name in stage.ties if name not in stage.absent]
        engine = StagedHalf(engine, ties, groups.ends, groups.column, counts=stage.stage == 0)
    if layout.tensor > 1:
        assert mesh is not None
        engine = TensorParallelHalf(engine, summed, mesh["tensor"], _named(module, engine.parameters))
    if groups.context is not None:
        names, sums = _named(module, engine.parameters), layout.shard == "fsdp"
        engine = ContextParallelHalf(engine, groups.context, names, sums_in_backward=sums)
    return engine


def _divide_layers(
    module: HalvedModule,
    role: str,
    layout: Layout,
    groups: RoleGroups,
    modules: dict[str, nn.Module],
    experts: list[nn.Module],
) -> list[tuple[nn.Module, str]]:
    """Divides layers, and the tokens of experts, among tensor ranks.

    Returns:
        owner and name of each parameter of which every tensor rank has a summand of the gradient only.
    """
    assert groups.mesh is not None
    mesh, stage = groups.mesh["tensor"], module.held_stages.get(role) if layout.pipeline > 1 else None
    plan, elsewhere = module.tensor_plan(role, layout.tensor), [stage.computes_elsewhere] if stage else []
    summed = divide_layers(modules, plan, mesh, *elsewhere)
    return [*dict.fromkeys([*summed, *divide_tokens_of_experts(modules.values(), experts, mesh)])]


def _named(module: HalvedModule, parameters: Sequence[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Path -> parameter, of these."""
    own = {id(parameter) for parameter in parameters}
    return {name: parameter for name, parameter in module.named_parameters() if id(parameter) in own}


def _expert_half(
    parameters: list[nn.Parameter],
    experts: list[nn.Module],
    group: dist.ProcessGroup | None,
    copies: dist.ProcessGroup,
    activations: ActivationsOnHost | None,
) -> ExpertParallelHalf:
    """A half of whole copies whose experts are divided, and are the same on the ranks of ``copies``."""
    divided = {id(stack) for module in experts for stack in module.parameters()}
    common = ReplicatedHalf([each for each in parameters if id(each) not in divided], group, activations=activations)
    own = ReplicatedHalf([each for each in parameters if id(each) in divided], copies)
    return ExpertParallelHalf(common, own, parameters)


def _deepspeed_half(
    modules: dict[str, nn.Module],
    layout: Layout,
    groups: RoleGroups,
    activations: ActivationsOnHost | None,
    optimizer_on_host: bool,
    device_type: str,
    fill: Fill,
) -> HalfEngine:
    """A half that DeepSpeed runs: ZeRO-3 divides its weights as they are filled, stages 1 and 2 hold them whole."""
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    if layout.shard == "deepspeed-3":
        return DeepSpeedShardedHalf(
            modules, groups.all, device, fill=fill, activations=activations, optimizer_on_host=optimizer_on_host
        )
    fill(None)
    stage: Stage = 1 if layout.shard == "deepspeed-1" else 2
    return DeepSpeedHalf(
        modules, groups.all, device, stage=stage, activations=activations, optimizer_on_host=optimizer_on_host
    )


def _mesh(layout: Layout, ranks: list[int], device_type: str) -> DeviceMesh:
    """The ranks of the role within the default group: stages, those that see other tokens, neighbours of a layer."""
    data = {"data": layout.data * layout.context}
    if layout.shard == "fsdp":
        replicas = {"replica": layout.replicas} if layout.replicas > 1 else {}
        data = {**replicas, "shard": layout.data // layout.replicas * layout.context}
    stages = {"stage": layout.pipeline} if layout.pipeline > 1 else {}
    sizes = {**stages, **data, **({"tensor": layout.tensor} if layout.tensor > 1 else {})}
    with shut_at_the_end():
        return DeviceMesh(device_type, torch.tensor(ranks).view(*sizes.values()), mesh_dim_names=tuple(sizes))


def _expert_mesh(layout: Layout, ranks: list[int], device_type: str) -> DeviceMesh:
    """The ranks of the role within the default group: those that hold the same experts, then those that share all.

    These are neighbouring data-parallel ranks, within a shard group, with all of their tensor ranks.
    """
    each = layout.data // layout.replicas // layout.expert
    degrees = (layout.replicas, each, layout.expert, layout.context, layout.tensor)
    arranged = torch.tensor(ranks).view(degrees).transpose(2, 3)
    sizes = {"replica": layout.replicas * each * layout.context, EXPERT: layout.expert_ranks}
    if layout.shard == "fsdp":
        replicas = {"replica": layout.replicas} if layout.replicas > 1 else {}
        sizes = {**replicas, "shard": each * layout.context, EXPERT: layout.expert_ranks}
    with shut_at_the_end():
        return DeviceMesh(device_type, arranged.reshape(*sizes.values()), mesh_dim_names=tuple(sizes))


def _context_group(layout: Layout, ranks: list[int], device_type: str, own: bool) -> dist.ProcessGroup | None:
    """The ranks that share this one's sequences and its share of every layer; None on a rank of another role."""
    arranged = torch.tensor(ranks).view(layout.pipeline * layout.data, layout.context, layout.tensor)
    with shut_at_the_end():
        mesh = DeviceMesh(device_type, arranged, mesh_dim_names=("data", "context", "tensor"))
    return mesh.get_group("context") if own else None
