"""What a layout adds to the costs of a profile, which are of whole copies on one rank: sums, gathers, recomputing.

A profile knows how long ranks take to sum. A ring sums in a scatter and a gather of as many bytes (Thakur et al. 2005),
so each takes half of that. None of it is taken to be hidden by computing, as on CPUs, where both need the same cores.
"""

from __future__ import annotations

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.placement.profile import Profile

_WIDTHS = {"64-true": 8, "32-true": 4}
"""Precision -> bytes of a weight that is gathered; other precisions compute in 16 bits."""


def end_seconds(profile: Profile, role: str, allocation: Allocation) -> tuple[float, float]:
    """What a rank does for a role at the end of a step: seconds of the gradient reduction, and of the optimizer."""
    half, layout = profile.roles[role], allocation.layouts[role]
    shards = _shards(allocation, role)
    reduction = _summing(profile, half.gradient_bytes / shards, layout.data // shards)
    return reduction, half.optimizer_seconds / shards


def batch_seconds(profile: Profile, role: str, allocation: Allocation) -> tuple[float, float]:
    """What sharding adds to a rank's forward and to its backward of one batch."""
    half, shards = profile.roles[role], _shards(allocation, role)
    width = _WIDTHS.get(str(profile.origin.settings.get("precision")), 2)
    gather = _summing(profile, half.parameters * width, shards) / 2
    return gather, gather + _summing(profile, half.gradient_bytes, shards) / 2


def repeated_share(allocation: Allocation, role: str) -> float:
    """The part of a forward that a backward computes again; what costs no matrix product is taken to cost nothing."""
    return 1.0 if allocation.recompute.get(role) == "full" else 0.0


def _shards(allocation: Allocation, role: str) -> int:
    """Ranks that hold a role's weights once between them."""
    layout = allocation.layouts[role]
    return layout.data // layout.replicas if layout.shard == "fsdp" else 1


def _summing(profile: Profile, size: float, ranks: int) -> float:
    return 0.0 if profile.reduction is None else profile.reduction.seconds(round(size), ranks)
