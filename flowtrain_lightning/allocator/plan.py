"""The answer of planning: a placement, a layout for every role, and what a step of it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flowtrain_lightning.allocator.candidates import Candidate
from flowtrain_lightning.allocator.problem import RoleProblem
from flowtrain_lightning.allocator.roles import BACKBONE

PlanName = Literal["uniform", "colocated", "separate", "mixed"]
"""``"uniform"``: one layout for all roles on all devices. ``"colocated"``: all roles on all devices, each in its own
layout. ``"separate"``: every device has one role. ``"mixed"``: some devices encode only, the backbone's encode too."""

Problems = Mapping[str, RoleProblem]


@dataclass(frozen=True)
class Plan:
    """A placement with a layout for every role, and what a step of it takes.

    Attributes:
        name: how roles share devices.
        chosen: role -> its layout, encoders first.
        devices: devices in use.
        seconds: of a step.
        waiting: of these, seconds until the first features are there and after the last gradients.
        samples_per_second: over all devices.
        mfu: FLOPs that a step must spend over what the whole cluster could meanwhile.
        peak_bytes: memory of the fullest device.
    """

    name: PlanName
    chosen: Mapping[str, Candidate]
    devices: int
    seconds: float
    waiting: float
    samples_per_second: float
    mfu: float
    peak_bytes: float

    @property
    def shares_devices(self) -> bool:
        """Whether some device has several roles."""
        return self.name != "separate"


def make_plan(
    name: PlanName, problems: Problems, chosen: Mapping[str, Candidate], *, seconds: float, waiting: float = 0.0
) -> Plan:
    """A plan with its figures."""
    cluster = problems[BACKBONE].cluster
    flops = sum(problem.model_flops for problem in problems.values())
    together = joint_bytes(problems, {role: candidate.bytes for role, candidate in chosen.items()})
    apart = sum(candidate.devices for candidate in chosen.values())
    return Plan(
        name,
        chosen,
        devices=apart if name == "separate" else max(candidate.devices for candidate in chosen.values()),
        seconds=seconds,
        waiting=waiting,
        samples_per_second=problems[BACKBONE].load.items / seconds,
        mfu=flops / seconds / (cluster.devices * cluster.device.peak),
        peak_bytes=max(candidate.bytes for candidate in chosen.values()) if name == "separate" else together,
    )


def joint_bytes(problems: Problems, of_roles: Mapping[str, float]) -> float:
    """Bytes of several roles on one device: the overhead is there once."""
    overhead = problems[BACKBONE].cluster.device.overhead
    return overhead + sum(each - overhead for each in of_roles.values())
