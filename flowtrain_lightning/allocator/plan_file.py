"""Plans as YAML that a person can read, edit and pass back as ``allocation: plan.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from flowtrain_lightning.allocator.allocation import Allocation, Order, Placement
from flowtrain_lightning.allocator.role_layout import AllocationError, Layout, Offload, Recompute, number_spans
from flowtrain_lightning.packing.role_graph import Edge

Part = TypeVar("Part")


@dataclass(frozen=True)
class PlanContent:
    """The contents of a plan's file.

    Attributes:
        placement: whether roles share ranks.
        roles: role -> what `RoleContent` holds, as it stands there.
        edges: modality -> which role encodes it and which one reads the features; needed where names do not say it.
        order: what decides in which order ranks work.
        activation_bytes: of activations that a rank may keep for backwards.
        encoder_activations: encoder batches whose activations a rank keeps.
    """

    placement: Placement
    roles: dict[str, Any]
    edges: dict[str, list[str]] | None = None
    order: Order = "rules"
    activation_bytes: float | None = None
    encoder_activations: int | None = None


@dataclass(frozen=True)
class RoleContent:
    """The contents of a plan's file about one role.

    Attributes:
        layout: what a `Layout` is made of, as it stands there.
        ranks: as in ``0-5, 8``, or a list.
        recompute: what its backward computes again.
        offload: what of it lies in host memory.
    """

    layout: dict[str, Any]
    ranks: int | str | list[int | str]
    recompute: Recompute = "none"
    offload: Offload = "none"


def write_plan(allocation: Allocation, path: Path, heading: str) -> None:
    """Write an allocation so that `read_plan` gives it back.

    Args:
        allocation: who does what in which layout.
        path: the file to write.
        heading: comment at the top, such as where the plan is from and what it promises.

    Raises:
        AllocationError: the file cannot be written.
    """
    roles: dict[str, dict[str, Any]] = {}
    for role, layout in allocation.layouts.items():
        degrees = {name: degree for name, degree in layout.degrees.items() if degree > 1 or name == "data"}
        replicas = {"replicas": layout.replicas} if layout.replicas > 1 else {}
        experts = {"expert": layout.expert} if layout.expert > 1 else {}
        virtual = {"virtual": layout.virtual} if layout.virtual > 1 else {}
        schedule = {"schedule": layout.schedule} if layout.schedule != "1f1b" else {}
        cut = {"cut": layout.cut} if layout.cut != "time" else {}
        shared = {**degrees, **virtual, **schedule, **cut, **experts, "shard": layout.shard, **replicas}
        roles[role] = {"layout": shared, "ranks": number_spans(allocation.ranks[role])}
        if role in allocation.recompute:
            roles[role]["recompute"] = allocation.recompute[role]
        if role in allocation.offload:
            roles[role]["offload"] = allocation.offload[role]
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    content: dict[str, Any] = {"placement": allocation.placement, "roles": roles}
    if named := {modality: list(ends) for *ends, modality in allocation.edges or () if modality is not None}:
        content["edges"] = named
    if allocation.order != "rules":
        content["order"] = allocation.order
    limits = {name: getattr(allocation, name) for name in ("activation_bytes", "encoder_activations")}
    content |= {name: limit for name, limit in limits.items() if limit is not None}
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
    try:
        path.write_text(comment + text, encoding="utf-8")
    except OSError as error:
        raise AllocationError(f"{path} cannot be written: {error}") from error


def read_plan(path: Path) -> Allocation:
    """The allocation in a file that `write_plan` wrote, or a person.

    Raises:
        AllocationError: the file cannot be read, has a key that no plan has, or contradicts itself.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise AllocationError(f"{path} cannot be read as a plan: {error}") from error
    try:
        plan = _parsed(PlanContent, content, "a plan")
        given = {str(role): values for role, values in plan.roles.items()}
        roles = {role: _parsed(RoleContent, values, f"the role {role!r}") for role, values in given.items()}
        return Allocation(
            plan.placement,
            {role: _parsed(Layout, one.layout, f"the layout of the role {role!r}") for role, one in roles.items()},
            {role: _ranks(one.ranks, f"the role {role!r}") for role, one in roles.items()},
            {role: one.recompute for role, one in roles.items() if "recompute" in given[role]},
            {role: one.offload for role, one in roles.items() if "offload" in given[role]},
            None if plan.edges is None else tuple(_edge(modality, ends) for modality, ends in plan.edges.items()),
            plan.order,
            plan.activation_bytes,
            plan.encoder_activations,
        )
    except AllocationError as error:
        raise AllocationError(f"{path}: {error}") from error


def _edge(modality: str, ends: list[str]) -> Edge:
    if len(ends) != 2:
        raise AllocationError(
            f"edges: {modality} is {ends!r}; name the role that encodes it and the one that reads its features."
        )
    return Edge(ends[0], ends[1], modality)


def _parsed(kind: type[Part], values: Any, what: str) -> Part:
    """Values from a file as a dataclass, whose fields say which keys there may be and of which types."""
    import jsonargparse  # which takes a tenth of a second, and is needed by those alone who read a plan

    keys = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        raise AllocationError(f"{what} must be names with values, but is {values!r}; it has {keys}.")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    try:
        return kind(**vars(parser.parse_object(dict(values))))
    except jsonargparse.ArgumentError as error:
        raise AllocationError(f"{what} cannot be used: {_sentence(str(error))}; it has {keys}.") from error


def _sentence(text: str) -> str:
    """Puts jsonargparse's message into one line, without Python's names of types."""
    line = " ".join(text.split()).replace("a typing.Literal[", "one of [").rstrip(".")
    return re.sub(r"a <class '(\w+)'>", r"type \1", line)


def _ranks(text: int | str | list[int | str], where: str) -> tuple[int, ...]:
    """The ranks that text such as ``0-5, 8`` names; a list of numbers will do too."""
    found: list[int] = []
    for part in text if isinstance(text, list) else str(text).split(","):
        first, dash, last = str(part).strip().partition("-")
        if not first.strip().isdigit() or (dash and not last.strip().isdigit()):
            raise AllocationError(f"{where} has ranks {text!r}; write them as in '0-5, 8-13'.")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
