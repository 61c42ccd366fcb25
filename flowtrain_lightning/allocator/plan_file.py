"""Plans as YAML that a person can read, edit and pass back as ``allocation: plan.yaml``."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from flowtrain_lightning.allocator.allocation import (
    Allocation,
    AllocationError,
    Layout,
    Offload,
    Recompute,
    number_spans,
)

_PLAN_KEYS = ("placement", "roles")
_ROLE_KEYS = ("layout", "ranks", "recompute", "offload")
_LAYOUT_KEYS = ("data", "tensor", "pipeline", "context", "shard", "replicas", "expert")


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
        shared = {**degrees, **experts, "shard": layout.shard, **replicas}
        roles[role] = {"layout": shared, "ranks": number_spans(allocation.ranks[role])}
        if role in allocation.recompute:
            roles[role]["recompute"] = allocation.recompute[role]
        if role in allocation.offload:
            roles[role]["offload"] = allocation.offload[role]
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    text = yaml.safe_dump({"placement": allocation.placement, "roles": roles}, sort_keys=False, default_flow_style=None)
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
    if not isinstance(content, Mapping) or not isinstance(content.get("roles"), Mapping):
        raise AllocationError(f"{path} is no plan; it must have 'placement' and 'roles', as `flowtrain plan` writes.")
    layouts: dict[str, Layout] = {}
    ranks: dict[str, tuple[int, ...]] = {}
    recompute: dict[str, Recompute] = {}
    offload: dict[str, Offload] = {}
    try:
        _refuse_unknown_keys(content.keys(), _PLAN_KEYS, "a plan")
        for role, values in content["roles"].items():
            where = f"the role {role!r}"
            if not isinstance(values, Mapping) or not {"layout", "ranks"} <= set(values):
                raise AllocationError(f"{where} must have 'layout' and 'ranks'.")
            _refuse_unknown_keys(values.keys(), _ROLE_KEYS, where)
            layouts[str(role)], ranks[str(role)] = _layout(values["layout"], where), _ranks(values["ranks"], where)
            if "recompute" in values:
                recompute[str(role)] = values["recompute"]
            if "offload" in values:
                offload[str(role)] = values["offload"]
        return Allocation(str(content.get("placement")), layouts, ranks, recompute, offload)  # type: ignore[arg-type]
    except AllocationError as error:
        raise AllocationError(f"{path}: {error}") from error


def _refuse_unknown_keys(given: Set[Any], known: tuple[str, ...], where: str) -> None:
    if unknown := sorted(map(str, given - set(known))):
        raise AllocationError(f"{where} has no {', '.join(map(repr, unknown))}; it has {', '.join(known)}.")


def _layout(values: Any, where: str) -> Layout:
    if not isinstance(values, Mapping):
        raise AllocationError(f"{where} has a layout without names; a layout has {', '.join(_LAYOUT_KEYS)}.")
    _refuse_unknown_keys(values.keys(), _LAYOUT_KEYS, f"the layout of {where}")
    for name, degree in values.items():
        if name != "shard" and type(degree) is not int:
            raise AllocationError(f"{where} has {name} {degree!r}; it must be a whole number.")
    return Layout(**values)


def _ranks(text: Any, where: str) -> tuple[int, ...]:
    """The ranks that text such as ``0-5, 8`` names; a list of numbers will do too."""
    found: list[int] = []
    for part in text if isinstance(text, list) else str(text).split(","):
        first, dash, last = str(part).strip().partition("-")
        if not first.strip().isdigit() or (dash and not last.strip().isdigit()):
            raise AllocationError(f"{where} has ranks {text!r}; write them as in '0-5, 8-13'.")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
