"""Models of time fitted to a profile: the shares of a device's peaks that each half was measured to reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flowtrain_lightning.allocator import (
    PRECISIONS,
    Cluster,
    Device,
    Efficiency,
    ModuleDescription,
    RoleProblem,
)
from flowtrain_lightning.allocator.coefficients import assumed_efficiency
from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.devices import maker_device
from flowtrain_lightning.allocator.pass_time import pass_time
from flowtrain_lightning.allocator.role_problem import Family, Precision
from flowtrain_lightning.allocator.sharing_time import sharing_time
from flowtrain_lightning.allocator.workload import RoleLoad
from flowtrain_lightning.placement.profile import Profile, ProfileError, ReductionCost

_LIKE = 0.1
"""Relative difference in parameters up to which a description may be of the profiled module."""


def measured_efficiencies(
    profile: Profile, module: ModuleDescription, device: Device, precision: str
) -> dict[str, Efficiency]:
    """Role -> the device's shares, all lowered or raised alike, so that predicted passes take as long as measured ones.

    What was measured covers everything that takes time but collectives and waiting for other ranks, casts of weights
    and the adding of gradients to earlier ones too; the optimizer was measured by itself. Of collectives the sum of
    gradients is measured on CPUs, whose processors carry the bytes themselves: nothing hides it there. Where the
    profile was made on another known device, its shares are lowered or raised by what was found there.

    Args:
        profile: of this module. If its device is not known by its maker's name, it is taken for ``device``.
        module: its description.
        device: for which is planned.
        precision: for which is planned.

    Raises:
        ProfileError: the profile is of another module, of another precision, or with other halves frozen.
    """
    if (measured := profile.origin.settings["precision"]) != precision:
        raise ProfileError(f"The profile is of {measured}, but the plan is for {precision}; choose one for both.")
    for role, half in module.roles.items():
        _refuse_another(profile, role, half, module.name)
    return {
        role: _efficiency(profile, role, half, device, precision)
        for role, half in module.roles.items()
        if profile.roles[role].measured
    }


def _refuse_another(profile: Profile, role: str, half: Half, name: str) -> None:
    if role not in profile.roles:
        raise ProfileError(f"The profile has the roles {', '.join(profile.roles)}, but {name} has {role} as well.")
    profiled = profile.roles[role]
    if abs(half.parameters / profiled.parameters - 1) > _LIKE:
        raise ProfileError(
            f"The profile is of a module whose {role} has {profiled.parameters / 1e6:,.2f}M parameters, but that of "
            f"{name} has {half.parameters / 1e6:,.2f}M; profile this module, or leave the profile out."
        )
    if half.trains != profiled.trains:
        there, here = ("trains", "is frozen") if profiled.trains else ("is frozen", "trains")
        raise ProfileError(f"The {role} {there} in the profile, but {here} in the plan; freeze the same in both.")


def _efficiency(profile: Profile, role: str, half: Half, device: Device, precision: str) -> Efficiency:
    measured = profile.roles[role].measured
    before = {profile.trunk: profile.producers, **dict.fromkeys(profile.behind, (*profile.producers, profile.trunk))}
    receives_gradient = any(profile.roles[each].trains for each in before.get(role, ()))
    profiled = maker_device(profile.origin.device) or device
    there = assumed_efficiency(profiled)
    cluster, numbers = Cluster(profiled, 1, 1), PRECISIONS[precision]
    most = max(item.tokens for item in measured)
    ratios = []
    for item in measured:
        if item.tokens < most / 2:  # plans are for full microbatches
            continue
        load = RoleLoad(np.array([max(1, round(item.squares / item.tokens))]), 1.0, int(most), 1)
        problem = RoleProblem(role, half, load, receives_gradient, cluster, numbers, there)
        ratios.append(item.seconds / _alone(problem, item.tokens))
    slower = float(np.median(ratios))
    assumed = assumed_efficiency(device)
    exchange, contention = assumed.exchange, assumed.contention
    if profile.reduction is not None and profile.reduction.seconds_per_byte > 0:
        exchange, contention = exchange * _reached(profile.reduction, profiled) / there.exchange, 1.0
    return replace(
        assumed,
        exchange=exchange,
        contention=contention,
        dense=assumed.dense / slower,
        attention=assumed.attention / slower,
        memory=assumed.memory / slower,
        update=_update(profile.roles[role].optimizer_seconds, half, profiled, numbers) or assumed.update / slower,
        launch=assumed.launch * slower,
    )


def _alone(problem: RoleProblem, tokens: float) -> float:
    """Seconds of a microbatch as profiles measure it: on one device, weights cast, gradients added to earlier ones."""
    family = Family(np.ones(1))
    once = pass_time(problem, family, np.array([tokens]))
    beside = sharing_time(problem, family, once, microbatches=np.array([np.inf]))  # so that no first one counts
    return float((once.total + beside.forward + beside.backward)[0])


def _update(seconds: float, half: Half, device: Device, precision: Precision) -> float:
    """The share of a device's memory bandwidth that an optimizer was measured to reach; 0 where it was not."""
    return half.trainable_parameters * precision.updated / seconds / device.memory_bandwidth if seconds > 0 else 0.0


def _reached(reduction: ReductionCost, device: Device) -> float:
    """The share of a device's link that a sum of gradients was measured to reach, of many bytes in a ring."""
    moved = 2 * (reduction.ranks - 1) / reduction.ranks  # of each byte, by each rank
    return moved / reduction.seconds_per_byte / device.link
