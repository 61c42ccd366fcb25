"""Assigns roles to ranks: by rule of thumb, or by a plan's layouts, node by node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import get_args

from flowtrain_lightning.allocator.allocation import Allocation, Placement, refuse_unknown_placement
from flowtrain_lightning.allocator.role_layout import AllocationError, Layout
from flowtrain_lightning.packing.role_graph import RoleGraph
from flowtrain_lightning.packing.step_members import TWO_ROLES

BACKBONE_SHARE = 4
"""One rank in so many encodes: in common vision-language models the backbone does most of the work."""


def default_allocation(
    devices: int,
    placement: Placement | None = None,
    encoder_ranks: int | Mapping[str, int] | None = None,
    devices_per_node: int | None = None,
    ranks_per_device: int = 1,
    graph: RoleGraph = TWO_ROLES,
) -> Allocation:
    """Allocate replicated data-parallel roles by rule.

    One device has all roles; so have devices too few for each role to have one, and those of a module with a role
    behind the trunk. On more, a quarter of the ranks, but at least one for each role that encodes, only encodes. These
    are the last ranks of each node, so that features stay within the node; where they do not divide evenly the last
    nodes have one more. Where ranks share devices, one of each device encodes. Rank 0 always has the trunk, such as the
    backbone.

    Args:
        devices: ranks in all.
        placement: ``"colocated"`` gives all roles to every rank, ``"separate"`` one to each, and with ``"mixed"`` the
            ranks of the trunk encode too; None follows the rule.
        encoder_ranks: how many ranks only encode, which roles that encode share as evenly as they can; or role ->
            how many encode for it alone, or generate. None follows the rule. A role behind the trunk of which nothing
            is said has a quarter of the ranks.
        devices_per_node: ranks of each node; None means that all are on one node.
        ranks_per_device: ranks that share a device. Encoder ranks are spread over as many devices as there are.
        graph: the roles.

    Raises:
        AllocationError: the settings contradict each other, or leave a role without ranks.
    """
    per_node = devices if devices_per_node is None else devices_per_node
    _refuse_bad_settings(devices, placement, encoder_ranks, per_node, graph)
    producers, left_open = graph.producers, placement is None and encoder_ranks is None
    everyone = tuple(range(devices))
    if placement == "colocated" or (left_open and (graph.behind or devices <= max(1, len(producers)))):
        return _replicated("colocated", dict.fromkeys(graph.roles, everyone), graph)
    share = BACKBONE_SHARE if ranks_per_device == 1 else ranks_per_device
    only = max(len(producers), devices // share) if encoder_ranks is None else encoder_ranks
    counts = {role: only[role] for role in producers} if isinstance(only, Mapping) else _evenly(only, producers)
    said = only if isinstance(only, Mapping) else {}
    counts |= {role: said.get(role, max(1, devices // share)) for role in graph.behind}
    encoding = sum(counts.values())
    if encoding >= devices:
        raise AllocationError(
            f"{encoding} {'other' if graph.behind else 'encoder'} ranks leave no {graph.trunk} rank on "
            f"{_devices(devices)}; use at most {devices - 1}."
            if devices > 1
            else 'Ranks of one role need at least 2 devices, but there is 1; use placement="colocated".'
        )
    encoders = _last_of_each_node(encoding, devices // per_node, per_node, ranks_per_device)
    trunk = tuple(rank for rank in everyone if rank not in encoders)
    if placement == "mixed":
        return _replicated("mixed", {**dict.fromkeys(graph.roles, everyone), graph.trunk: trunk}, graph)
    if missing := [role for role in producers if not counts.get(role)]:
        raise AllocationError(
            f"With encoder_ranks={encoder_ranks} the {missing[0]} has no rank of its own; give each of "
            f'{", ".join(producers)} one, or use placement="colocated" or "mixed".'
        )
    return _replicated("separate", {**_ranks_by_role(encoders, counts, per_node), graph.trunk: trunk}, graph)


def _evenly(ranks: int, producers: Sequence[str]) -> dict[str, int]:
    """Role that encodes -> its number of ranks, as even as can be."""
    each, more = divmod(ranks, len(producers))
    return {role: each + (number < more) for number, role in enumerate(producers)}


def _ranks_by_role(ranks: tuple[int, ...], counts: Mapping[str, int], per_node: int) -> dict[str, tuple[int, ...]]:
    """Role -> its ranks, ascending: on every node its share of those there, side by side."""
    roles = list(counts)
    dealt: dict[str, int] = dict.fromkeys(roles, 0)
    on_node: dict[int, list[str]] = defaultdict(list)
    for number, rank in enumerate(ranks, 1):
        left = [role for role in roles if dealt[role] < counts[role]]
        behind = max(left, key=lambda role: counts[role] * number / len(ranks) - dealt[role])
        dealt[behind] += 1
        on_node[rank // per_node].append(behind)
    found: dict[str, list[int]] = {role: [] for role in roles}
    for node, of_node in on_node.items():
        there = [rank for rank in ranks if rank // per_node == node]
        for rank, role in zip(there, sorted(of_node, key=roles.index), strict=True):
            found[role].append(rank)
    return {role: tuple(own) for role, own in found.items()}


def _last_of_each_node(encoders: int, nodes: int, per_node: int, ranks_per_device: int) -> tuple[int, ...]:
    """The encoder ranks, ascending. Fewer encoders than ranks in all, so node 0 always keeps its first rank."""
    each, more = divmod(encoders, nodes)
    # The last rank of every device, from the last device on; then the one before it of every device, and so on.
    last_first = sorted(range(per_node), key=lambda rank: (rank % ranks_per_device, rank), reverse=True)
    found: list[int] = []
    for node in range(nodes):
        count = each + (node >= nodes - more)
        found += sorted(node * per_node + rank for rank in last_first[:count])
    return tuple(found)


def _replicated(placement: Placement, ranks: Mapping[str, tuple[int, ...]], graph: RoleGraph) -> Allocation:
    layouts = {role: Layout(data=len(ranks[role])) for role in graph.roles}
    return Allocation(placement, layouts, {role: ranks[role] for role in graph.roles}).bound(graph)


def _refuse_bad_settings(
    devices: int,
    placement: Placement | None,
    encoder_ranks: int | Mapping[str, int] | None,
    devices_per_node: int,
    graph: RoleGraph,
) -> None:
    if devices < 1:
        raise AllocationError(f"There are {devices} devices; training needs at least 1.")
    if devices_per_node < 1 or devices % devices_per_node:
        raise AllocationError(
            f"{_devices(devices)} cannot be divided into nodes of {devices_per_node}; every node must have as many."
        )
    if placement is not None:
        refuse_unknown_placement(placement, get_args(Placement))
    if encoder_ranks is None:
        return
    if placement == "colocated":
        raise AllocationError(
            'With placement="colocated" no rank only encodes; leave encoder_ranks out, or use placement="separate" or '
            '"mixed".'
        )
    if isinstance(encoder_ranks, Mapping):
        _refuse_bad_counts(encoder_ranks, placement, graph)
    elif encoder_ranks < 1:
        raise AllocationError(f"encoder_ranks is {encoder_ranks}; at least 1 rank must encode.")


def _refuse_bad_counts(counts: Mapping[str, int], placement: Placement | None, graph: RoleGraph) -> None:
    if placement == "mixed":
        raise AllocationError(
            f'encoder_ranks={dict(counts)} gives each role ranks of its own, but with placement="mixed" ranks that '
            "only encode do so for all roles; give their number."
        )
    if set(counts) - {*graph.behind} != set(graph.producers) or min(counts.values()) < 1:
        raise AllocationError(
            f"encoder_ranks is {dict(counts)}; give each role that encodes ({', '.join(graph.producers)}) at least 1 "
            f"rank, and no other one{f', but {graph.behind[0]}' if graph.behind else ''}."
        )


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def assign_ranks(
    layouts: Mapping[str, Layout], first: str, per_node: int, block: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Role -> its ranks, ascending, for roles on devices of their own.

    Ranks of one role come first on every node and those of the others behind them, so that features stay near. All are
    spread over the nodes as evenly as groups of tensor ranks allow, which are never on two nodes: tensor degrees divide
    each other and the node, so that these groups, the largest first, fill blocks of the largest degree without a gap;
    blocks then are dealt to the nodes in turns.

    Args:
        layouts: role -> its layout.
        first: the role that has rank 0.
        per_node: devices of a node.
        block: devices of a block; None is the largest tensor degree.

    Raises:
        AllocationError: of several nodes the first role would have the end of the last one, so that it cannot have
            rank 0.
    """
    size = block or largest_tensor_degree(layouts)
    count, total = layouts[first].ranks, sum(layout.ranks for layout in layouts.values())
    order = [first, *(role for role in layouts if role != first)]
    blocks = _filled_blocks({role: layouts[role] for role in order}, size)
    partial = blocks.pop() if sum(blocks[-1].values()) < size else None
    nodes = -(-total // per_node)
    if nodes > 1 and partial is not None and partial.get(first) == count:
        raise AllocationError(
            f"The {first} has {_devices(count)}, but tensor ranks come in groups of {size}; give it at least {size}, "
            "since it has rank 0."
        )
    capacities = [per_node // size] * nodes
    capacities[-1] = len(blocks) - sum(capacities[:-1])
    contents = _dealt(sorted(blocks, key=lambda each: -each.get(first, 0)), capacities)
    if partial is not None:
        contents[-1].append(partial)
    ranks: dict[str, list[int]] = {role: [] for role in layouts}
    rank = 0
    for node in contents:
        for role in order:
            count = sum(each.get(role, 0) for each in node)
            ranks[role] += range(rank, rank + count)
            rank += count
    return {role: tuple(found) for role, found in ranks.items()}


def largest_tensor_degree(layouts: Mapping[str, Layout]) -> int:
    """The most ranks that share a layer in any role."""
    return max(layout.tensor for layout in layouts.values())


def _filled_blocks(layouts: Mapping[str, Layout], size: int) -> list[dict[str, int]]:
    """Counts the devices of each role, in their order, in every block; only the last one may be less than full."""
    falling = sorted(layouts, key=lambda role: -layouts[role].tensor)
    blocks: list[dict[str, int]] = [defaultdict(int)]
    for role in falling:
        left = layouts[role].ranks
        while left:
            if (free := size - sum(blocks[-1].values())) == 0:
                blocks.append(defaultdict(int))
                free = size
            added = min(left, free)
            blocks[-1][role] += added
            left -= added
    return blocks


def _dealt(blocks: list[dict[str, int]], capacities: list[int]) -> list[list[dict[str, int]]]:
    """The blocks of each node: dealt in turns, as many to each as it holds."""
    contents: list[list[dict[str, int]]] = [[] for _ in capacities]
    node = 0
    for block in blocks:
        while len(contents[node]) >= capacities[node]:
            node = (node + 1) % len(capacities)
        contents[node].append(block)
        node = (node + 1) % len(capacities)
    return contents
