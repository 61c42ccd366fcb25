"""Plans as YAML that a person can read, edit and pass back as ``allocation: plan.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from flowtrain_lightning.allocator import Allocation, AllocationError, Layout

_LAYOUT = ("data", "tensor", "pipeline", "context", "shard")


def write_plan(allocation: Allocation, path: Path, heading: str, recompute: Mapping[str, str]) -> None:
    """Write an allocation.

    Args:
        allocation: who does what in which layout.
        path: the file to write.
        heading: comment at the top, such as where the plan is from and what it promises.
        recompute: role -> what its backward computes again, as the plan assumes it.

    Raises:
        AllocationError: the file cannot be written.
    """
    roles = {}
    for role, layout in allocation.layouts.items():
        degrees = {name: degree for name, degree in layout.degrees.items() if degree > 1 or name == "data"}
        roles[role] = {"layout": {**degrees, "shard": layout.shard}, "ranks": _spans(allocation.ranks[role])}
        if role in recompute:
            roles[role]["recompute"] = recompute[role]
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    text = yaml.safe_dump({"placement": allocation.placement, "roles": roles}, sort_keys=False, default_flow_style=None)
    try:
        path.write_text(comment + text, encoding="utf-8")
    except OSError as error:
        raise AllocationError(f"{path} cannot be written: {error}") from error


def read_plan(path: Path) -> Allocation:
    """The allocation in a file that `write_plan` wrote, or a person.

    Raises:
        AllocationError: the file cannot be read, or what it says does not fit together.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise AllocationError(f"{path} cannot be read as a plan: {error}") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("roles"), Mapping):
        raise AllocationError(f"{path} is no plan; it must have 'placement' and 'roles', as `flowtrain plan` writes.")
    layouts, ranks = {}, {}
    for role, values in content["roles"].items():
        if not isinstance(values, Mapping) or not {"layout", "ranks"} <= set(values):
            raise AllocationError(f"{path}: the role {role!r} must have 'layout' and 'ranks'.")
        layouts[str(role)] = _layout(values["layout"], f"{path}: the role {role!r}")
        ranks[str(role)] = _ranks(values["ranks"], f"{path}: the role {role!r}")
    try:
        return Allocation(str(content.get("placement")), layouts, ranks)  # type: ignore[arg-type]
    except AllocationError as error:
        raise AllocationError(f"{path}: {error}") from error


def _layout(values: Any, where: str) -> Layout:
    if not isinstance(values, Mapping) or (unknown := sorted(set(map(str, values)) - set(_LAYOUT))):
        wrong = f"has a layout with {', '.join(unknown)}" if isinstance(values, Mapping) else "has no layout by name"
        raise AllocationError(f"{where} {wrong}; a layout has {', '.join(_LAYOUT)}.")
    for name, degree in values.items():
        if name != "shard" and type(degree) is not int:
            raise AllocationError(f"{where} has {name} {degree!r}; it must be a whole number.")
    try:
        return Layout(**values)
    except ValueError as error:
        raise AllocationError(f"{where}: {error}") from error


def _spans(ranks: tuple[int, ...]) -> str:
    """Ranks as text: neighbours are joined, as in ``0-5, 8-13``."""
    known = set(ranks)
    starts = [rank for rank in ranks if rank - 1 not in known]
    ends = [rank for rank in ranks if rank + 1 not in known]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _ranks(text: Any, where: str) -> tuple[int, ...]:
    """The ranks that text such as ``0-5, 8`` names; a list of numbers will do too."""
    found: list[int] = []
    for part in text if isinstance(text, list) else str(text).split(","):
        first, dash, last = str(part).strip().partition("-")
        if not first.strip().isdigit() or (dash and not last.strip().isdigit()):
            raise AllocationError(f"{where} has ranks {text!r}; write them as in '0-5, 8-13'.")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
