"""What ranks of an allocation take for each piece of a step: all that simulating it asks.

A profile knows whole copies on one rank, and how long ranks take to sum. What layouts add follows from that: a ring
sums in a scatter and a gather of as many bytes (Thakur et al. 2005), so each takes half of it. None of it is taken to
be hidden by computing, as on CPUs, where both need the same cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flowtrain_lightning.allocator import BACKBONE, ENCODER, ROLES, Allocation, AllocationError
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.placement.profile import Profile

_WIDTHS = {"64-true": 8, "32-true": 4}
"""Precision -> bytes of a weight that is gathered; other precisions compute in 16 bits."""


class LayoutCosts(Protocol):
    """Seconds of what the ranks of one allocation do."""

    @property
    def encoder_trains(self) -> bool:
        """Encoder batches have backwards."""

    @property
    def forward_share(self) -> float:
        """The part of a microbatch that is its forward, from 0 to 1."""

    def microbatch(self, tokens: IntArray) -> float:
        """Forward and backward of a microbatch, by the ``[sequences]`` tokens of its sequences."""

    def encoder_batch(self, patches: IntArray) -> tuple[float, float]:
        """Forward and backward of an encoder batch, by the ``[media items]`` patches of its media items."""

    def end_of_step(self, role: str) -> tuple[float, float]:
        """The gradient reduction and the optimizer."""


@dataclass(frozen=True)
class ProfiledLayoutCosts:
    """Costs by a profile, for ranks that compute whole layers on whole sequences.

    Attributes:
        profile: of whole copies on one rank.
        allocation: of both roles.

    Raises:
        AllocationError: other roles, or layouts of which a profile does not say what they take.
    """

    profile: Profile
    allocation: Allocation

    def __post_init__(self) -> None:
        if set(self.allocation.layouts) != set(ROLES):
            raise AllocationError(
                f"A profile has the roles {' and '.join(ROLES)}, but the plan has {', '.join(self.allocation.layouts)}."
            )
        for role, layout in self.allocation.layouts.items():
            if layout.ranks_of_member > 1 or layout.shard.startswith("zero") or layout.shard == "deepspeed-3":
                raise AllocationError(
                    f"The plan's {role} has {layout.describe()}, but a profile of whole layers and sequences does not "
                    "say what ranks take that divide these. The module's dimensions do: `flowtrain simulate --model`."
                )

    @property
    def encoder_trains(self) -> bool:
        """See `LayoutCosts`."""
        return self.profile.roles[ENCODER].trains

    @property
    def forward_share(self) -> float:
        """See `LayoutCosts`."""
        return self.profile.roles[BACKBONE].forward_share

    def microbatch(self, tokens: IntArray) -> float:
        """See `LayoutCosts`."""
        again = self._repeated_share(BACKBONE) * self.forward_share
        return self.profile.cost.of_set(tokens) * (1 + again) + sum(self._sharing(BACKBONE))

    def encoder_batch(self, patches: IntArray) -> tuple[float, float]:
        """See `LayoutCosts`."""
        encoder, (gather, back) = self.profile.roles[ENCODER], self._sharing(ENCODER)
        seconds = encoder.cost.of_set(patches)
        if not encoder.trains:
            return seconds + gather, 0.0
        forward = seconds * encoder.forward_share
        return forward + gather, seconds - forward + self._repeated_share(ENCODER) * forward + back

    def end_of_step(self, role: str) -> tuple[float, float]:
        """See `LayoutCosts`."""
        half, layout, shards = self.profile.roles[role], self.allocation.layouts[role], self._shards(role)
        if not layout.by_deepspeed:
            return self._summing(half.gradient_bytes / shards, layout.data // shards), half.optimizer_seconds / shards
        updated = self._summing(half.gradient_bytes, shards) / 2
        scattered = self._summing(half.gradient_bytes, shards) / 2 if layout.shard == "deepspeed-1" else 0.0
        return scattered + updated, half.optimizer_seconds / shards

    def _sharing(self, role: str) -> tuple[float, float]:
        """What a layout adds to a rank's forward and to its backward of one batch."""
        half, layout, shards = self.profile.roles[role], self.allocation.layouts[role], self._shards(role)
        scatter = self._summing(half.gradient_bytes, shards) / 2
        if layout.by_deepspeed:
            return 0.0, scatter if layout.shard == "deepspeed-2" else 0.0
        width = _WIDTHS.get(str(self.profile.origin.settings.get("precision")), 2)
        gather = self._summing(half.parameters * width, shards) / 2
        return gather, gather + scatter

    def _repeated_share(self, role: str) -> float:
        """The part of a forward that a backward computes again; what costs no product is taken to cost nothing."""
        return 1.0 if self.allocation.recompute.get(role) == "full" else 0.0

    def _shards(self, role: str) -> int:
        """Ranks that hold once between them what the role's layout divides."""
        layout = self.allocation.layouts[role]
        return 1 if layout.shard == "replicate" else layout.data // layout.replicas

    def _summing(self, size: float, ranks: int) -> float:
        return 0.0 if self.profile.reduction is None else self.profile.reduction.seconds(round(size), ranks)
