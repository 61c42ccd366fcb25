"""The bars of ``flowtrain plan --verbose``: layouts in the planner's words, memory by purpose, and the step in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowtrain_lightning.allocator.candidates import usable_bytes
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan, joint_bytes
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.placement.text_table import counted

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
    "stragglers": "t",
    "sharding": "s",
    "reduction": "r",
    "optimizer": "o",
    "offload": "h",
    "waiting": "w",
    "idle": ".",
}
"""Purpose of bytes or seconds -> its letter in a bar."""

LEGEND = {
    "exchange": "exchange among tensor and context ranks",
    "bubble": "pipeline bubble",
    "stragglers": "waiting for the slowest rank",
    "sharding": "gathering and casting weights, adding gradients up",
    "reduction": "reduction of gradients",
    "offload": "activations to the host's memory and back",
    "waiting": "waiting for the first features",
}


@dataclass(frozen=True)
class Phase:
    """A part of a role's step.

    Attributes:
        purpose: a field of `RoleTime`, ``"waiting"`` or ``"idle"``.
        start: seconds from the step's beginning.
        seconds: how long.
    """

    purpose: str
    start: float
    seconds: float


def bars_of(plan: ModelledPlan, problems: Problems) -> str:
    """All bars of a plan, in blocks."""
    return "\n\n".join([_layouts(plan), _memory(plan, problems), _time(plan, problems)])


def _layouts(plan: ModelledPlan) -> str:
    lines = [
        f"  {role:<{_longest(plan)}}  {candidate.layout.describe()}; {counted(candidate.devices, 'device')}; "
        f"recompute {candidate.recompute}" + ("" if candidate.offload == "none" else f"; offload {candidate.offload}")
        for role, candidate in plan.chosen.items()
    ]
    return "\n".join([f"Layouts ({plan.name})", *lines])


def _memory(plan: ModelledPlan, problems: Problems) -> str:
    limit = usable_bytes(problems.cluster)
    lines = [f"Memory of a device, GB (a bar is the {limit / 1e9:.1f} that can be planned for)"]
    total: dict[str, float] = {}
    for role, candidate in plan.chosen.items():
        use = candidate.details(problems[role]).memory.at(0)
        total[role] = sum(use.values())
        lines.append(_line(plan, role, bar(use, limit), use, 1e9))
    if plan.kind != "separate":
        lines.append(f"  {'together':<{_longest(plan)}}  {joint_bytes(problems, total) / 1e9:.1f}")
    return "\n".join(lines)


def _time(plan: ModelledPlan, problems: Problems) -> str:
    lines = [f"Step, s (a bar is {plan.seconds:.3f} s)"]
    used = set()
    for role, phases in step_phases(plan, problems).items():
        before = {"idle": phases[0].start} if phases[0].start else {}
        shown = {phase.purpose: phase.seconds for phase in phases}
        used |= set(shown)
        lines.append(_line(plan, role, bar({**before, **shown}, plan.seconds), shown, 1.0))
    legend = [f"{PURPOSES[name]} {meaning}" for name, meaning in LEGEND.items() if name in used]
    return "\n".join([*lines, *([f"  {'; '.join(legend)}"] if legend else [])])


def step_phases(plan: ModelledPlan, problems: Problems) -> dict[str, list[Phase]]:
    """Role -> its phases in a step, as if each kind of work were done in one piece.

    Roles on devices of their own run side by side; the backbone begins when the first features are there. Roles on the
    same devices follow one another. In a mixed plan encoders are shown on the devices that do nothing else, and the
    time before the backbone's work is when its devices encode. What a simulated step takes beyond its work is idle.
    """
    found, clock, together = {}, 0.0, plan.kind in ("uniform", "colocated")
    work = [one.seconds for one in plan.chosen.values()]
    fits = min(1.0, plan.seconds / (sum(work) if together else max(work)))
    *_, last = plan.chosen
    for role, candidate in plan.chosen.items():
        parts = [(name, part * fits) for name, part in candidate.details(problems[role]).time.at(0).items()]
        share = candidate.seconds * fits
        idle = max(0.0, plan.seconds - share)
        if plan.kind == "separate":
            first = min(plan.waiting, idle) if role == problems.trunk else 0.0
            found[role] = _phases([("waiting", first), *parts, ("idle", idle - first)], 0.0)
        elif plan.kind == "mixed" and role == problems.trunk:
            found[role] = _phases(parts, idle)
        else:
            wider = 1.0
            if plan.kind == "mixed":
                encoding = sum(plan.chosen[name].seconds for name in problems.encoders)
                wider = plan.seconds / (encoding * fits)
            rest = plan.seconds - clock - share if together and role == last else 0.0
            stretched = [(name, part * wider) for name, part in parts]
            found[role] = _phases([*stretched, ("idle", rest if rest > 1e-9 else 0.0)], clock)
            clock += share * wider
    return found


def _phases(parts: list[tuple[str, float]], start: float) -> list[Phase]:
    phases = []
    for purpose, seconds in parts:
        if seconds > 0:
            phases.append(Phase(purpose, start, seconds))
        start += seconds
    return phases


def bar(parts: Mapping[str, float], whole: float) -> str:
    """Parts of a whole as letters, `WIDTH` of them for all."""
    letters, end = "", 0.0
    for purpose, amount in parts.items():
        end += amount
        letters += PURPOSES[purpose] * max(0, round(WIDTH * end / whole) - len(letters))
    return letters.ljust(WIDTH)


def _line(plan: ModelledPlan, role: str, text: str, parts: Mapping[str, float], unit: float) -> str:
    shown = "  ".join(f"{name} {amount / unit:.3g}" for name, amount in parts.items() if amount / unit >= 5e-4)
    return f"  {role:<{_longest(plan)}}  |{text}|  {shown}"


def _longest(plan: ModelledPlan) -> int:
    return max(len("together"), *map(len, plan.chosen))
