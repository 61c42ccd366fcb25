"""How ``flowtrain plan`` prints: a table of placements, memory bars, the step in time, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowtrain_lightning.allocator import Comparison, ModuleDescription, Plan
from flowtrain_lightning.allocator.candidates import usable_bytes
from flowtrain_lightning.allocator.plan import joint_bytes
from flowtrain_lightning.allocator.roles import BACKBONE
from flowtrain_lightning.allocator.timeline import timeline

WIDTH = 60

PURPOSES = {
    "weights": "W",
    "gradients": "G",
    "states": "S",
    "activations": "A",
    "logits": "L",
    "features": "F",
    "overhead": "O",
    "forward": "f",
    "backward": "b",
    "exchange": "x",
    "bubble": "p",
    "sharding": "s",
    "reduction": "r",
    "optimizer": "o",
    "waiting": "w",
    "idle": ".",
}
"""Purpose of bytes or seconds -> its letter in a bar."""

LEGEND = {
    "exchange": "exchange among tensor and context ranks",
    "bubble": "pipeline bubble",
    "sharding": "gathering and casting weights",
    "reduction": "reduction of gradients",
    "waiting": "waiting for the first features",
}


def as_text(comparison: Comparison, module: ModuleDescription, data: str) -> str:
    """Everything, for a terminal."""
    plan = comparison.best
    parts = [
        _heading(comparison, module, data),
        _placements(comparison),
        comparison.verdict(),
        _layouts(plan),
        _memory(comparison),
        _time(comparison),
    ]
    return "\n\n".join(parts)


def as_values(comparison: Comparison, module: ModuleDescription, data: str) -> dict[str, Any]:
    """Everything, for JSON. Bytes, seconds and shares are plain numbers."""
    cluster = comparison.problems[BACKBONE].cluster
    return {
        "model": module.name,
        "parameters": {role: half.parameters for role, half in module.roles.items()},
        "device": cluster.device.name,
        "devices": cluster.devices,
        "devices_per_node": cluster.per_node,
        "data": data,
        "recommended": comparison.best.name,
        "verdict": comparison.verdict(),
        "gain_of_separation": comparison.gain_of_separation(),
        "plans": {
            name: None if plan is None else _plan_values(plan, comparison) for name, plan in comparison.plans.items()
        },
    }


def _plan_values(plan: Plan, comparison: Comparison) -> dict[str, Any]:
    roles = {}
    for role, candidate in plan.chosen.items():
        details = candidate.details(comparison.problems[role])
        roles[role] = {
            "layout": {**candidate.layout.degrees, "shard": candidate.layout.shard},
            "recompute": candidate.recompute,
            "seconds": details.time.at(0),
            "microbatches": int(details.time.microbatches[0]),
            "bytes": details.memory.at(0),
        }
    return {
        "devices": plan.devices,
        "step_seconds": plan.seconds,
        "waiting_seconds": plan.waiting,
        "samples_per_second": plan.samples_per_second,
        "mfu": plan.mfu,
        "peak_bytes": plan.peak_bytes,
        "roles": roles,
    }


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first flush left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for cells in (head, *rows):
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        lines.append("  ".join([cells[0].ljust(widths[0]), *rest]))
    return "\n".join(lines)


def _heading(comparison: Comparison, module: ModuleDescription, data: str) -> str:
    problem = comparison.problems[BACKBONE]
    cluster, load = problem.cluster, problem.load
    sizes = ", ".join(f"{role} {_billions(half.parameters)}" for role, half in module.roles.items())
    tokens = ", ".join(f"{one.load.tokens:,.0f} of the {role}" for role, one in comparison.problems.items())
    return (
        f"{module.name} ({sizes}) on {cluster.devices} {cluster.device.name}, {cluster.per_node} a node\n"
        f"a step: {load.items:,.0f} samples with tokens {tokens}; data: {data}"
    )


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e8 else f"{parameters / 1e6:.1f}M"


def _placements(comparison: Comparison) -> str:
    rows = []
    for name, plan in comparison.plans.items():
        mark = "> " if plan is comparison.best else "  "
        if plan is None:
            rows.append((f"{mark}{name}", "no such plan", "", "", "", ""))
            continue
        speed = f"{plan.samples_per_second:,.1f}"
        gigabytes = f"{plan.peak_bytes / 1e9:.1f}"
        rows.append(
            (f"{mark}{name}", str(plan.devices), f"{plan.seconds:.3f}", speed, f"{100 * plan.mfu:.1f} %", gigabytes)
        )
    return columns(("  placement", "devices", "step s", "samples/s", "MFU", "peak GB"), rows)


def _layouts(plan: Plan) -> str:
    rows = [
        f"  {role:<{_longest(plan)}}  {candidate.layout.describe()}; {candidate.devices} devices; "
        f"recompute {candidate.recompute}"
        for role, candidate in plan.chosen.items()
    ]
    return "\n".join([f"Layouts ({plan.name})", *rows])


def _memory(comparison: Comparison) -> str:
    plan, problems = comparison.best, comparison.problems
    limit = usable_bytes(problems[BACKBONE].cluster)
    lines = [f"Memory of a device, GB (a bar is the {limit / 1e9:.1f} that can be planned for)"]
    total: dict[str, float] = {}
    for role, candidate in plan.chosen.items():
        use = candidate.details(problems[role]).memory.at(0)
        total[role] = sum(use.values())
        lines.append(_row(plan, role, bar(use, limit), use, 1e9))
    if plan.shares_devices:
        lines.append(f"  {'together':<{_longest(plan)}}  {joint_bytes(problems, total) / 1e9:.1f}")
    return "\n".join(lines)


def _time(comparison: Comparison) -> str:
    plan = comparison.best
    lines = [f"Step, s (a bar is {plan.seconds:.3f} s)"]
    used = set()
    for role, phases in timeline(plan, comparison.problems).items():
        spans = {"idle": phases[0].start} if phases[0].start else {}
        text = bar({**spans, **{phase.purpose: phase.seconds for phase in phases}}, plan.seconds)
        shown = {phase.purpose: phase.seconds for phase in phases}
        used |= set(shown)
        lines.append(_row(plan, role, text, shown, 1.0))
    said = [f"{PURPOSES[name]} {meaning}" for name, meaning in LEGEND.items() if name in used]
    return "\n".join([*lines, *([f"  {'; '.join(said)}"] if said else [])])


def bar(parts: Mapping[str, float], whole: float) -> str:
    """Parts of a whole as letters, `WIDTH` of them for all."""
    letters, end = "", 0.0
    for purpose, amount in parts.items():
        end += amount
        letters += PURPOSES[purpose] * max(0, round(WIDTH * end / whole) - len(letters))
    return letters.ljust(WIDTH)


def _row(plan: Plan, role: str, text: str, parts: Mapping[str, float], unit: float) -> str:
    shown = "  ".join(f"{name} {amount / unit:.3g}" for name, amount in parts.items() if amount / unit >= 5e-4)
    return f"  {role:<{_longest(plan)}}  |{text}|  {shown}"


def _longest(plan: Plan) -> int:
    return max(len("together"), *map(len, plan.chosen))
