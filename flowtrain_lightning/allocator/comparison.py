"""All placements beside each other: which one is the fastest, and what separation wins or loses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowtrain_lightning.allocator.candidates import Choices, candidates, usable_bytes
from flowtrain_lightning.allocator.devices import Cluster
from flowtrain_lightning.allocator.errors import PlanningError
from flowtrain_lightning.allocator.mixed import mixed_plan
from flowtrain_lightning.allocator.plan import Plan, Problems
from flowtrain_lightning.allocator.roles import BACKBONE
from flowtrain_lightning.allocator.separate import separate_plan
from flowtrain_lightning.allocator.together import colocated_plan, uniform_plan

NOTICEABLE = 0.03
"""What a plan must gain to be preferred to a simpler one: the models of time cannot tell less apart."""

_MOST_DEVICES = 2**16


class NoPlanError(PlanningError):
    """The module fits in no layout."""


@dataclass(frozen=True)
class Comparison:
    """The best plan of every placement.

    Attributes:
        problems: role -> what was planned for.
        plans: name -> its best plan, the simplest first; None where nothing fits.
        best: the recommended one: the simplest of those that are within `NOTICEABLE` of the fastest.
    """

    problems: Problems
    plans: Mapping[str, Plan | None]
    best: Plan

    def gain_of_separation(self) -> float | None:
        """Samples per second of the best plan with devices that have one role, over the best without, minus 1."""
        apart = _fastest(self.plans["separate"], self.plans["mixed"])
        together = _fastest(self.plans["uniform"], self.plans["colocated"])
        if apart is None or together is None:
            return None
        return together.seconds / apart.seconds - 1

    def verdict(self) -> str:
        """The recommendation, with what separation wins or loses."""
        apart = _fastest(self.plans["separate"], self.plans["mixed"])
        together = _fastest(self.plans["uniform"], self.plans["colocated"])
        gain = self.gain_of_separation()
        if gain is None or apart is None or together is None:
            missing = "All roles on the same devices" if together is None else "Roles on devices of their own"
            return f"Recommended: {self.best.name}. {missing} would not fit."
        if abs(gain) <= NOTICEABLE:
            percent = round(100 * gain, 1) + 0.0  # nothing is not below nothing
            return f"Recommended: {self.best.name}. Separation neither wins nor loses ({percent:+.1f} % samples/s)."
        word, over = ("wins", "over") if gain > 0 else ("loses", "to")
        said = f"Separation ({apart.name}) {word} {100 * abs(gain):.1f} % samples/s {over} {together.name}."
        return f"Recommended: {self.best.name}. {said}"


def compare(problems: Problems, choices: Choices | None = None) -> Comparison:
    """The best plan of every placement, and which to use.

    Args:
        problems: role -> what is known of it, see `role_problems`.
        choices: which layouts may be used at all.

    Raises:
        NoPlanError: no layout fits; says how many devices would do.
    """
    choices = choices or Choices()
    plans = _plans(problems, choices)
    found = [plan for plan in plans.values() if plan is not None]
    if not found:
        raise NoPlanError(_refusal(problems, choices))
    fastest = min(plan.seconds for plan in found)
    best = next(plan for plan in found if plan.seconds <= fastest * (1 + NOTICEABLE))
    return Comparison(problems, plans, best)


def _plans(problems: Problems, choices: Choices) -> dict[str, Plan | None]:
    tables = {role: candidates(problem, choices) for role, problem in problems.items()}
    return {
        "uniform": uniform_plan(problems, choices),
        "colocated": colocated_plan(problems, tables),
        "separate": separate_plan(problems, tables),
        "mixed": mixed_plan(problems, tables),
    }


def _fastest(*plans: Plan | None) -> Plan | None:
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.seconds, default=None)


def _refusal(problems: Problems, choices: Choices) -> str:
    cluster = problems[BACKBONE].cluster
    devices = "1 device" if cluster.devices == 1 else f"{cluster.devices} devices"
    said = (
        f"The module fits in no layout on {devices} {cluster.device.name} of "
        f"{usable_bytes(cluster) / 1e9:.0f} GB that can be planned for"
    )
    smallest = smallest_cluster(problems, choices)
    if smallest is None:
        return f"{said}, nor on any larger number up to {_MOST_DEVICES}; lower the token budget or freeze a half."
    return f"{said}; the smallest number that would do is {smallest}."


def smallest_cluster(problems: Problems, choices: Choices) -> int | None:
    """The fewest devices on which something fits: whole nodes, or part of one; None up to 65,536."""
    count = problems[BACKBONE].cluster.devices
    while count <= _MOST_DEVICES and not _fits(problems, choices, count):
        count = _next_size(problems[BACKBONE].cluster, count, 2 * count)
    if count > _MOST_DEVICES:
        return None
    low, high = problems[BACKBONE].cluster.devices, count
    while (middle := _next_size(problems[BACKBONE].cluster, low, (low + high) // 2)) not in (low, high):
        low, high = (low, middle) if _fits(problems, choices, middle) else (middle, high)
    return high


def _next_size(cluster: Cluster, least: int, count: int) -> int:
    """``count``, or what is a little less, so that nodes are whole; but above ``least``."""
    if count <= cluster.per_node:
        return count
    step = cluster.per_node
    return max(count // step * step, (least // step + 1) * step)


def _fits(problems: Problems, choices: Choices, devices: int) -> bool:
    cluster = replace(problems[BACKBONE].cluster, devices=devices)
    larger = {role: replace(problem, cluster=cluster) for role, problem in problems.items()}
    tables = {role: candidates(problem, choices) for role, problem in larger.items()}
    if all(len(table) for table in tables.values()):
        apart = sum(float(table.devices.min()) for table in tables.values())
        if apart <= devices or colocated_plan(larger, tables) or mixed_plan(larger, tables):
            return True
    return uniform_plan(larger, choices) is not None
