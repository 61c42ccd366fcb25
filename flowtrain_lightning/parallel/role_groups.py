"""The groups in which the ranks of one role meet: shards and copies of weights, shares of layers, sequences, stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.parallel.experts.expert_parallel import EXPERT
from flowtrain_lightning.parallel.ranks.groups import Groups
from flowtrain_lightning.ports import shut_at_the_end


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
        layout: its degrees.
        groups: of the calling rank.
        device_type: on which it computes, for example ``"cuda"``.
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
