"""From a role's layout to the engine that puts it onto the role's half of a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from flowtrain_lightning.parallel.replicate import ReplicatedHalf
from flowtrain_lightning.parallel.role_groups import RoleGroups
from flowtrain_lightning.parallel.stages.staged_half import StagedHalf
from flowtrain_lightning.parallel.tensor_parallel import TensorParallelHalf
from flowtrain_lightning.parallel.tensor_plan import divide_layers

_PRECISION = {
    "bf16-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16-true": MixedPrecisionPolicy(reduce_dtype=torch.float32),
}
"""The Trainer's precision -> what FSDP2 gathers and sums in; elsewhere all is in the dtype of the weights."""

Fill = Callable[[Callable[[nn.Parameter], None] | None], None]
"""Gives weights without memory their numbers, whole or in parts, and calls its argument with each that has got them."""


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
        engine = _replicated_half(held_parameters(module, role), experts, groups, on_host, early)
    else:
        engine = FullyShardedHalf(
            modules,
            _shards_of(layout, groups, groups.mesh),
            replicas=groups.replicas,
            wrap=_wrapping(module, role, layout, groups, modules, experts),
            fill=partial(fill, None),
            absent=absent_parameters(module, role),
            precision=_PRECISION.get(precision),
            recompute=recompute,
            offload_parameters=offload in ("weights", "all"),
            activations=on_host,
        )
    return _within_its_rank(engine, module, role, layout, groups, summed)


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


def _shards_of(layout: Layout, groups: RoleGroups, mesh: DeviceMesh | None) -> DeviceMesh:
    """The ranks of a mesh that hold a share each; HSDP's copies of these too, where FSDP2 sums over them by itself."""
    assert mesh is not None
    return mesh[("replica", "shard") if layout.replicas > 1 and groups.replicas is None else ("shard",)]


def _wrapping(
    module: HalvedModule,
    role: str,
    layout: Layout,
    groups: RoleGroups,
    modules: dict[str, nn.Module],
    experts: list[nn.Module],
) -> Callable[..., None]:
    """What puts FSDP2 onto the half, the user's ``parallelize_<role>`` if there is one; experts by their own ranks."""
    wrap = getattr(module, f"parallelize_{role}", partial(shard_repeated_blocks, list(modules.values())))
    if groups.experts is None:
        return wrap
    shards = _shards_of(layout, groups, groups.experts)

    def wrap_experts_too(*args: Any, **settings: Any) -> None:
        shard_experts(experts, shards, **settings)
        wrap(*args, **settings)

    return wrap_experts_too


def _replicated_half(
    parameters: list[nn.Parameter],
    experts: list[nn.Module],
    groups: RoleGroups,
    activations: ActivationsOnHost | None,
    early: bool,
) -> HalfEngine:
    """A half of whole copies."""
    # No mesh of one dimension: it would be the default group, in which early sums could meet other collectives.
    group = groups.all if groups.mesh is None else groups.mesh.get_group("data")
    if groups.experts is None:
        return ReplicatedHalf(parameters, group, early=early, activations=activations)
    return _expert_half(parameters, experts, group, groups.experts.get_group("replica"), activations)


def _within_its_rank(
    engine: HalfEngine,
    module: HalvedModule,
    role: str,
    layout: Layout,
    groups: RoleGroups,
    summed: list[tuple[nn.Module, str]],
) -> HalfEngine:
    """Adds what ranks share that stand for one data-parallel rank together: stages, layers and sequences."""
    if layout.pipeline > 1:
        assert groups.column is not None
        stage, held = module.held_stages[role], dict(module.named_parameters())
        ties = [held[name] for name in stage.ties if name not in stage.absent]
        engine = StagedHalf(engine, ties, groups.ends, groups.column, counts=stage.stage == 0)
    if layout.tensor > 1:
        assert groups.mesh is not None
        engine = TensorParallelHalf(engine, summed, groups.mesh["tensor"], _named(module, engine.parameters))
    if groups.context is not None:
        names, sums = _named(module, engine.parameters), layout.shard == "fsdp"
        engine = ContextParallelHalf(engine, groups.context, names, sums_in_backward=sums)
    return engine


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
