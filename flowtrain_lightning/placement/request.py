"""A user's request for an allocation, refused before any rank is started where it cannot be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from flowtrain_lightning.allocator import (
    ROLES,
    Allocation,
    AllocationError,
    Layout,
    Placement,
    RoleGraph,
    RoleLayout,
    default_allocation,
)
from flowtrain_lightning.allocator.plan_file import read_plan
from flowtrain_lightning.allocator.role_layout import Sharding, count_ranks, number_spans
from flowtrain_lightning.allocator.workload import ENCODER_BATCHES_IN_FLIGHT
from flowtrain_lightning.packing.stage_schedule import StageSchedule
from flowtrain_lightning.packing.step_members import TWO_ROLES
from flowtrain_lightning.placement.profile import Profile, read_profile

AUTO = "auto"
OFF = "off"

_TRAINED: tuple[Sharding, ...] = ("replicate", "fsdp", "deepspeed-1", "deepspeed-2", "deepspeed-3")


@dataclass(frozen=True)
class PlacementRequest:
    """A user's request for an allocation; None leaves a part open.

    Attributes:
        allocation: all of it.
        source: where ``allocation`` is from, for messages.
        placement: of the rule.
        encoder_ranks: of the rule.
        profile: ``"auto"`` measures the module, ``"off"`` does not; or what was measured before.
        roles: role -> what of its layout is asked for, beside the rule.
    """

    allocation: Allocation | None
    source: str
    placement: Placement | None
    encoder_ranks: int | Mapping[str, int] | None
    profile: Profile | str
    roles: Mapping[str, RoleLayout] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Nothing is said of who does what."""
        return self.allocation is None and self.placement is None and self.encoder_ranks is None

    def answer(
        self, ranks: int, nodes: int = 1, ranks_per_device: int = 1, graph: RoleGraph = TWO_ROLES
    ) -> Allocation | None:
        """The allocation that follows from the request alone, or None where there is something to find out.

        Args:
            ranks: of the run.
            nodes: on which they run, as many on each.
            ranks_per_device: how many of them share a device.
            graph: roles of the module that is to train.

        Raises:
            AllocationError: with what was asked for and what there is.
        """
        if self.allocation is not None:
            refuse_other_ranks(self.allocation, ranks, self.source)
            given = of_module(self.allocation, self.source, graph)
            refuse_what_cannot_run(given, self.source)
            return given
        if ranks == 1 or not self.is_open:
            per_node = ranks // nodes
            by_rule = default_allocation(ranks, self.placement, self.encoder_ranks, per_node, ranks_per_device, graph)
            found = by_rule.with_roles(self.roles)
            refuse_what_cannot_run(found, "What was asked for")
            return found
        return None


def make_request(
    allocation: Allocation | str | Path | None,
    placement: Placement | None,
    encoder_ranks: int | Mapping[str, int] | None,
    profile: str | Path,
    roles: Mapping[str, RoleLayout | Mapping[str, Any]] | None = None,
) -> PlacementRequest:
    """Read what was given, and refuse what contradicts itself.

    Raises:
        AllocationError: a file that is no plan, two settings that say the same thing, or a layout that does not exist.
        ProfileError: a file that is no profile.
    """
    layouts = None if roles is None else _role_layouts(roles)
    file = None if str(profile) in (AUTO, OFF) else str(profile)
    if allocation is not None:
        others = {"placement": placement, "encoder_ranks": encoder_ranks, "profile": file, "roles": roles}
        for name, value in others.items():
            if value is not None:
                raise AllocationError(
                    f"Both allocation and {name}={str(value)!r} are given, but an allocation says everything; leave "
                    f"one of the two out."
                )
    elif file is not None and (placement is not None or encoder_ranks is not None):
        raise AllocationError(
            f"profile={file!r} is there to plan the allocation by, but placement={placement!r} and "
            f"encoder_ranks={encoder_ranks!r} leave nothing to plan; leave the profile out, or these two."
        )
    if roles and placement is None and encoder_ranks is None and allocation is None:
        raise AllocationError(
            f"roles has a layout for the {' and the '.join(roles)}, but who encodes is left open, and what is measured "
            "to find out are whole copies. Give encoder_ranks or placement too, or an allocation that says everything."
        )
    costs = str(profile) if file is None else read_profile(Path(file))
    if allocation is None or isinstance(allocation, Allocation):
        return PlacementRequest(allocation, "The given allocation", placement, encoder_ranks, costs, layouts or {})
    return PlacementRequest(read_plan(Path(allocation)), str(allocation), placement, encoder_ranks, costs, {})


def _role_layouts(roles: Any) -> dict[str, RoleLayout]:
    """Role -> what of its layout is asked for, from what a user gave: layouts, or dictionaries of their fields."""
    if not isinstance(roles, Mapping):
        raise AllocationError(
            f"roles is {roles!r}; it says what layout each role has, as {{'backbone': {{'shard': 'fsdp'}}}}."
        )
    return {role: _role_layout(role, wanted) for role, wanted in roles.items()}


def _role_layout(role: str, wanted: Any) -> RoleLayout:
    known = {each.name for each in fields(RoleLayout)}
    if isinstance(wanted, Mapping):
        for name in wanted:
            if name not in known:
                raise AllocationError(
                    f"roles gives the {role} {name!r}, but a layout has {', '.join(sorted(known))} only."
                )
        wanted = _made(role, wanted)
    if not isinstance(wanted, RoleLayout):
        raise AllocationError(
            f"roles gives the {role} {wanted!r}; give a RoleLayout or a dictionary such as {{'shard': 'fsdp'}}."
        )
    if wanted.shard not in _TRAINED:
        raise AllocationError(
            f"roles gives the {role} shard {wanted.shard!r}, which can be planned but not trained; a run has "
            f"{', '.join(map(repr, _TRAINED))}."
        )
    return wanted


def _made(role: str, wanted: Mapping[str, Any]) -> RoleLayout:
    try:
        return RoleLayout(**wanted)
    except AllocationError as error:
        raise AllocationError(f"roles for the {role}: {error}") from error


def batches_kept(asked: int | None, allocation: Allocation | None) -> int:
    """Encoder batches whose activations each rank keeps: as was asked for, or as the allocation says, or as usual."""
    planned = None if allocation is None else allocation.encoder_activations
    return next(each for each in (asked, planned, ENCODER_BATCHES_IN_FLIGHT) if each is not None)


def refuse_other_ranks(allocation: Allocation, ranks: int, source: str) -> None:
    """Raise an AllocationError unless the allocation is for so many ranks."""
    if allocation.size != ranks:
        raise AllocationError(
            f"{source} is for {count_ranks(allocation.size)}, but the Trainer starts {count_ranks(ranks)}. Set "
            f"Trainer(devices={allocation.size}), on several nodes as many on each, or take a plan for {ranks}."
        )


def refuse_what_cannot_run(allocation: Allocation, source: str) -> None:
    """Raise an AllocationError for an allocation that can be planned today and not yet trained on."""
    if (reason := why_it_cannot_run(allocation)) is not None:
        raise AllocationError(f"{source} {reason}")


def of_module(allocation: Allocation, source: str, graph: RoleGraph) -> Allocation:
    """The allocation, for the roles of a module. Raises an AllocationError unless it has these."""
    if set(allocation.layouts) != set(graph.roles):
        raise AllocationError(
            f"{source} has the roles {', '.join(allocation.layouts)}, but the module has the halves "
            f"{', '.join(graph.roles)}. Give each of these ranks, and no other role."
        )
    return allocation.bound(graph)


def why_it_cannot_run(allocation: Allocation) -> str | None:
    """Returns the end of a sentence about what training does not offer of an allocation; None where it runs."""
    if not allocation.is_bound:
        return (
            f"has the roles {', '.join(allocation.layouts)}, whose names do not say what flows between them. Call them "
            f"{' and '.join(map(repr, ROLES))}, or name the edges: Allocation(..., edges=...), in a file edges: "
            "{image: [eye, reader]}."
        )
    for role, layout in allocation.layouts.items():
        if layout.expert > 1 and layout.by_deepspeed:
            return (
                f"divides the {role}'s experts among {layout.expert} ranks and has shard {layout.shard!r}, which do "
                "not go together. Divide experts with shard 'replicate' or 'fsdp'."
            )
        if role != allocation.trunk and layout.context > 1:
            return (
                f"gives the {role} context {layout.context}, but only the {allocation.trunk} has sequences to share; "
                "set it to 1."
            )
        if layout.pipeline > 1 and (reason := _why_no_stages(allocation, role)) is not None:
            return reason
        if layout.shard not in _TRAINED:
            return (
                f"gives the {role} the layout {layout.describe()}, but today the ranks of a role hold whole copies of "
                f"its half ({Layout(data=layout.ranks).describe()}), shards of it by FSDP2 "
                f"({Layout(data=layout.ranks, shard='fsdp').describe()}), either with tensor or context ranks, or "
                "what DeepSpeed's ZeRO leaves of it (shard 'deepspeed-1', 'deepspeed-2' or 'deepspeed-3')."
            )
        if layout.by_deepspeed and (layout.ranks_of_member > 1 or allocation.placement == "mixed"):
            return (
                f"gives the {role} the layout {layout.describe()} in the placement {allocation.placement}, but "
                "DeepSpeed runs here in separate and colocated placements, without tensor and context ranks. Take "
                "shard 'fsdp', which goes with all of them."
            )
        if layout.shard == "deepspeed-3" and allocation.recompute.get(role, "none") != "none":
            return (
                f"has the {role} in shard 'deepspeed-3' recompute its blocks, but while a backward computes a block "
                "again, ZeRO-3 gives up weights that the backward still needs. Leave recompute out, or take shard "
                "'fsdp'."
            )
    if (reason := _why_none_behind(allocation)) is not None:
        return reason
    trunk = set(allocation.ranks[allocation.trunk])
    for role, group in ((each, group) for each in allocation.producers for group in allocation.shard_groups(each)):
        if allocation.placement == "mixed" and not trunk.isdisjoint(group) and not trunk.issuperset(group):
            return (
                f"is mixed and gives the {role} the layout {allocation.layouts[role].describe()}, in which ranks "
                f"{number_spans(group)} need each other to compute, but only some of them are {allocation.trunk} "
                "ranks, which work in another order. Choose replicas or a tensor degree so that each such group is of "
                "one kind."
            )
    return None


def _why_no_stages(allocation: Allocation, role: str) -> str | None:
    """The same of a role in stages; None where it runs."""
    layout = allocation.layouts[role]
    given = f"gives the {role} the layout {layout.describe()}, but"
    encodes = role in allocation.producers
    if encodes and layout.stages != StageSchedule(layout.pipeline):
        return (
            f"{given} the stages of a role that encodes have one run of its layers each, and work in the order '1f1b'. "
            "Leave virtual and schedule out."
        )
    if encodes and allocation.placement == "mixed":
        return f"{given} in the placement mixed each rank encodes by itself. Take separate or colocated ones."
    if layout.shard not in ("replicate", "fsdp") or layout.expert > 1:
        return (
            f"{given} in a pipeline the ranks of a stage hold whole copies of its layers, or shards of FSDP2. Leave "
            "expert and other shards out."
        )
    if layout.stages.splits and (layout.shard != "replicate" or layout.tensor > 1):
        return (
            f"{given} the schedule {layout.schedule} makes gradients of weights later than the rest of a backward, "
            "which shards and tensor ranks sum with it. Take whole copies, or schedule '1f1b'."
        )
    if layout.stages.chunks > 1 and allocation.placement != "separate":
        return (
            f"{given} several runs of layers in a stage (virtual, 'zb-v') run in the placement separate today, not in "
            f"{allocation.placement}."
        )
    in_one_order = allocation.placement == "colocated" and not layout.stages.splits
    others = (*allocation.producers, *([allocation.trunk] if encodes else []))
    for other in others if allocation.placement != "separate" else ():
        beside = allocation.layouts[other]
        taken = in_one_order and beside.shard in ("replicate", "fsdp") and beside.expert == 1
        if beside.meets.binds and not taken:
            return (
                f"{given} the {other} on the same ranks has {beside.describe()}, whose ranks wait for each other in "
                f"the placement {allocation.placement}. Beside a stage take whole copies of it, or separate ranks."
            )
    if allocation.graph.behind:
        return f"{given} a {allocation.graph.behind[0]} does not go with a pipeline today. Set pipeline to 1."
    return None


def _why_none_behind(allocation: Allocation) -> str | None:
    """The same of a role behind the trunk; None where there is none."""
    for behind in allocation.graph.behind:
        if allocation.placement == "mixed":
            return (
                f"is mixed, but a {behind} behind the {allocation.trunk} runs in separate and colocated placements "
                "today. Take one of these."
            )
        for role, layout in allocation.layouts.items():
            if layout.by_deepspeed:
                return (
                    f"gives the {role} the layout {layout.describe()}, but beside a {behind} DeepSpeed has not been "
                    "tried. Take shard 'fsdp', which goes with it."
                )
            divided = layout.context > 1 or (role == behind and layout.tensor > 1)
            if divided and role in (behind, allocation.trunk):
                return (
                    f"gives the {role} the layout {layout.describe()}, but what a {behind} reads is not divided among "
                    "context ranks, nor are its own layers among tensor ranks. Set these degrees to 1."
                )
    return None
