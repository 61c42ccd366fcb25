"""What a planned step looks like in time: who does what when."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain_lightning.allocator.plan import Plan, Problems
from flowtrain_lightning.allocator.roles import BACKBONE


@dataclass(frozen=True)
class Phase:
    """A stretch of a role's step.

    Attributes:
        purpose: a field of `StepTime`, ``"waiting"`` or ``"idle"``.
        start: seconds from the step's beginning.
        seconds: how long.
    """

    purpose: str
    start: float
    seconds: float


def timeline(plan: Plan, problems: Problems) -> dict[str, list[Phase]]:
    """Role -> its phases in a step, as if each kind of work were done in one piece.

    Roles on devices of their own run side by side; the backbone begins when the first features are there. Roles on the
    same devices follow one another. In a mixed plan encoders are shown on the devices that do nothing else, and the
    time before the backbone's work is when its devices encode.
    """
    found, clock = {}, 0.0
    for role, candidate in plan.chosen.items():
        parts = list(candidate.details(problems[role]).time.at(0).items())
        idle = max(0.0, plan.seconds - candidate.seconds)
        if plan.name == "separate":
            first = min(plan.waiting, idle) if role == BACKBONE else 0.0
            found[role] = _phases([("waiting", first), *parts, ("idle", idle - first)], 0.0)
        elif plan.name == "mixed" and role == BACKBONE:
            found[role] = _phases(parts, idle)
        else:
            share = candidate.seconds / _encoding(plan) * plan.seconds if plan.name == "mixed" else candidate.seconds
            found[role] = _phases([(name, part * share / candidate.seconds) for name, part in parts], clock)
            clock += share
    return found


def _encoding(plan: Plan) -> float:
    """Seconds of all encoders together."""
    return sum(candidate.seconds for role, candidate in plan.chosen.items() if role != BACKBONE)


def _phases(parts: list[tuple[str, float]], start: float) -> list[Phase]:
    phases = []
    for purpose, seconds in parts:
        if seconds > 0:
            phases.append(Phase(purpose, start, seconds))
        start += seconds
    return phases
