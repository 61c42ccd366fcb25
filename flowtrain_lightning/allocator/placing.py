"""Which rank does what: a plan's layouts put onto nodes, so that tensor ranks share one and features stay near."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from flowtrain_lightning.allocator.allocation import Allocation, AllocationError
from flowtrain_lightning.allocator.layout import Layout
from flowtrain_lightning.allocator.plan import Plan
from flowtrain_lightning.allocator.roles import BACKBONE


def allocate(plan: Plan, per_node: int) -> Allocation:
    """The allocation of a plan.

    Backbone ranks come first on every node and encoder ranks last; both are spread over the nodes as evenly as
    tensor ranks allow, which are never on two nodes.

    Args:
        plan: what was chosen.
        per_node: devices of a node.
    """
    layouts = {role: candidate.layout for role, candidate in plan.chosen.items()}
    everyone = tuple(range(plan.devices))
    if plan.name == "separate":
        return Allocation("separate", layouts, place(layouts, per_node))
    if plan.name == "mixed":
        alone = {BACKBONE: layouts[BACKBONE], _FREE: Layout(data=plan.devices - layouts[BACKBONE].ranks)}
        backbone = place(alone, per_node, _block(layouts))[BACKBONE]
        ranks = {role: backbone if role == BACKBONE else everyone for role in layouts}
        return Allocation("mixed", layouts, ranks)
    return Allocation("colocated", layouts, dict.fromkeys(layouts, everyone))


def place(layouts: Mapping[str, Layout], per_node: int, block: int | None = None) -> dict[str, tuple[int, ...]]:
    """Role -> its ranks, ascending, for roles on devices of their own.

    Tensor degrees divide each other and the node, so that groups of tensor ranks, the largest first, fill blocks of
    the largest degree without a gap; blocks then are dealt to the nodes.

    Args:
        layouts: role -> its layout.
        per_node: devices of a node.
        block: devices of a block; None is the largest tensor degree.

    Raises:
        AllocationError: the backbone has fewer devices than a block, so that it cannot have rank 0.
    """
    size = block or _block(layouts)
    count, total = layouts[BACKBONE].ranks, sum(layout.ranks for layout in layouts.values())
    if count < size < total:
        devices = "1 device" if count == 1 else f"{count} devices"
        raise AllocationError(
            f"The backbone has {devices}, but tensor ranks come in groups of {size}; give it at least {size}, since it "
            "has rank 0."
        )
    blocks = _blocks(layouts, size)
    partial = blocks.pop() if sum(blocks[-1].values()) < size else None
    nodes = -(-total // per_node)
    room = [per_node // size] * nodes
    room[-1] = len(blocks) - sum(room[:-1])
    contents = _deal(sorted(blocks, key=lambda one: -one.get(BACKBONE, 0)), room)
    if partial is not None:
        contents[-1].append(partial)
    ranks: dict[str, list[int]] = {role: [] for role in layouts}
    order = [BACKBONE, *(role for role in layouts if role != BACKBONE)]
    rank = 0
    for node in contents:
        for role in order:
            count = sum(one.get(role, 0) for one in node)
            ranks[role] += range(rank, rank + count)
            rank += count
    return {role: tuple(found) for role, found in ranks.items()}


_FREE = "free"


def _block(layouts: Mapping[str, Layout]) -> int:
    return max(layout.tensor for layout in layouts.values())


def _blocks(layouts: Mapping[str, Layout], size: int) -> list[dict[str, int]]:
    """How many devices of each role are in every block; only the last one may be less than full."""
    falling = sorted(layouts, key=lambda role: (-layouts[role].tensor, role != BACKBONE))
    blocks: list[dict[str, int]] = [defaultdict(int)]
    for role in falling:
        left = layouts[role].ranks
        while left:
            if (free := size - sum(blocks[-1].values())) == 0:
                blocks.append(defaultdict(int))
                free = size
            taken = min(left, free)
            blocks[-1][role] += taken
            left -= taken
    return blocks


def _deal(blocks: list[dict[str, int]], room: list[int]) -> list[list[dict[str, int]]]:
    """Blocks dealt to the nodes in turns, as far as each has room."""
    contents: list[list[dict[str, int]]] = [[] for _ in room]
    node = 0
    for block in blocks:
        while len(contents[node]) >= room[node]:
            node = (node + 1) % len(room)
        contents[node].append(block)
        node = (node + 1) % len(room)
    return contents
