"""Whether hosts decode pictures as fast as a plan's steps need them: what no model of the devices' time knows."""

from __future__ import annotations

from math import ceil, isqrt

from flowtrain_lightning.allocator import ModuleDescription
from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.module_parts import Dense
from flowtrain_lightning.allocator.role_problem import Problems

DECODING = 35e-9
"""Seconds in which a core makes a pixel of what a tower sees from a JPEG file: decoded, scaled and cut into patches.
Measured with the image processor of the data module on an EPYC core: 34 to 57 ns, the larger the picture the less.
Files of more pixels than the tower sees take longer, and so do clips."""

MOST_CORES = 8
"""Cores that a device's host is taken to have for its loaders: clouds rent 8 to 26 beside a device."""

_SEEN = ("image", "video")
_CHANNELS = 3


def cores_for_pictures(plan: ModelledPlan, problems: Problems, module: ModuleDescription) -> float | None:
    """Cores that the busiest rank's loader needs to keep up with the steps; None where no encoder sees pixels.

    Each rank loads the media that it encodes, and ranks that share an encoder's layers each load all of theirs.
    """
    seconds: list[float] = []
    for modality, half in module.encoders.items():
        if modality in _SEEN and (pixels := _pixels_of_a_token(half)) is not None:
            role = module.role_of(modality)
            tokens = problems[role].load.tokens / plan.chosen[role].layout.data
            seconds.append(tokens * pixels * DECODING)
    together = max(seconds, default=0.0) if plan.kind == "separate" else sum(seconds)
    return together / plan.seconds if seconds else None


def workers_for(cores: float) -> int:
    """Processes that load for each rank: none where little is to be loaded, else with a third to spare."""
    return 0 if cores < 1 / 4 else ceil(cores * 4 / 3)


def loading_in_words(cores: float) -> str:
    """The report's line about loading."""
    if cores < 0.01:
        return "decoding pictures takes each rank less than 1 % of a core"
    return f"decoding pictures takes each rank {cores:.2g} of its host's cores, at {DECODING * 1e9:.0f} ms a megapixel"


def loading_warning(cores: float, problems: Problems) -> str | None:
    """That hosts may not keep up, and what would help; None where they do."""
    if cores <= MOST_CORES:
        return None
    device = problems.cluster.device.name
    return (
        f"Loading may be slower than this: to decode as fast, each rank needs about {ceil(cores)} cores of its host, "
        f"and beside {device} there are often {MOST_CORES} for it. Steps then take up to {cores / MOST_CORES:.1f} "
        "times as long; smaller pictures on disk (no larger than the encoder sees) decode faster."
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
