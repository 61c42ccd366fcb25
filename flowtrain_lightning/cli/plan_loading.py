"""Hosts decode pictures beside a plan's steps: how many cores that takes, and how much longer steps get with fewer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, isqrt

from flowtrain_lightning.allocator import Device, ModuleDescription
from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.module_parts import Dense
from flowtrain_lightning.allocator.role_problem import Problems

DECODING = 35e-9
"""Seconds in which a core makes a pixel of what a tower sees from a JPEG file: decoded, scaled and cut into patches.
Measured with the image processor of the data module on an EPYC core: 34 to 57 ns, the larger the picture the less.
Files of more pixels than the tower sees take longer, and so do clips."""

_SEEN = ("image", "video")
_CHANNELS = 3


def decoding_seconds(
    problems: Problems, module: ModuleDescription, loading: Mapping[str, int], *, apart: bool
) -> float | None:
    """Seconds in which a lone core decodes what the busiest rank loads of a step; None where no encoder sees pixels.

    Each rank loads the media that it encodes, and ranks that share an encoder's layers each load all of theirs.

    Args:
        problems: role -> what is computed of it.
        module: the same module.
        loading: role -> data-parallel members of its layout, among which its media are divided.
        apart: each rank has one role, and loads for no other.
    """
    seconds: list[float] = []
    for modality, half in module.encoders.items():
        if modality in _SEEN and (pixels := _pixels_of_a_token(half)) is not None:
            role = module.role_of(modality)
            seconds.append(problems[role].load.tokens / loading[role] * pixels * DECODING)
    if not seconds:
        return None
    return max(seconds) if apart else sum(seconds)


def cores_for_pictures(plan: ModelledPlan, problems: Problems, module: ModuleDescription) -> float | None:
    """Cores with which the busiest rank's loader keeps up with what devices compute; None where nobody sees pixels."""
    members = {role: one.layout.data for role, one in plan.chosen.items()}
    seconds = decoding_seconds(problems, module, members, apart=plan.kind == "separate")
    return None if seconds is None else seconds / (plan.seconds / plan.held_up)


def held_up_by_loading(plan: ModelledPlan, problems: Problems, module: ModuleDescription) -> ModelledPlan:
    """The plan with steps as long as hosts decode, where devices would be faster: loaders work ahead, so no longer."""
    cores = cores_for_pictures(plan, problems, module) or 0.0
    times = cores / problems.cluster.device.cores
    return plan if times <= 1 else replace(plan.slowed(times), held_up=times)


def workers_for(cores: float) -> int:
    """Processes that load for each rank: none where little is to be loaded, else with a third to spare."""
    return 0 if cores < 1 / 4 else ceil(cores * 4 / 3)


def loading_in_words(cores: float) -> str:
    """The report's line about loading."""
    if cores < 0.01:
        return "decoding pictures takes each rank less than 1 % of a core"
    return f"decoding pictures takes each rank {cores:.2g} of its host's cores, at {DECODING * 1e9:.0f} ms a megapixel"


def loading_warning(cores: float, device: Device) -> str | None:
    """That steps wait for hosts, and what would help; None where they do not."""
    if cores <= device.cores:
        return None
    return (
        f"Steps wait for pictures, {cores / device.cores:.1f} times as long as they would take: to decode as fast as "
        f"devices compute, each rank needs about {ceil(cores)} cores of its host, and beside {device.name} "
        f"{device.cores:g} are counted on (`cores` in its YAML file). Smaller pictures on disk (no larger than the "
        "encoder sees) decode faster."
    )


def _pixels_of_a_token(half: Half) -> int | None:
    """Pixels of a patch, whose numbers the first matrix multiplies: of three colours, in one frame or twice in two."""
    first = half.parts[0]
    if not isinstance(first, Dense):
        return None
    for frames in (1, 2):
        area, rest = divmod(first.inputs, _CHANNELS * frames)
        if rest == 0 and isqrt(area) ** 2 == area:
            return area
    return None
