"""Which ranks play which role, and in which layout: the answer of every allocator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from flowtrain_lightning.allocator.layout import Layout
from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER, ROLES

Placement = Literal["separate", "colocated"]
"""``"separate"`` gives every rank one role, ``"colocated"`` gives every rank both."""


class AllocationError(ValueError):
    """The ranks cannot be divided among the roles in this way."""


@dataclass(frozen=True)
class Allocation:
    """A layout and ranks for every role.

    Attributes:
        placement: whether roles share ranks.
        layouts: role -> its layout.
        ranks: role -> its global ranks, ascending. Together the roles use the ranks from 0 on without a gap, and
            rank 0 is a backbone rank, since loggers and the progress bar live there.

    Raises:
        AllocationError: a role is missing or unknown, or the ranks break what is said above.
    """

    placement: Placement
    layouts: Mapping[str, Layout]
    ranks: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        refuse_unknown_placement(self.placement)
        for name, roles in (("layouts", self.layouts), ("ranks", self.ranks)):
            if set(roles) != set(ROLES):
                raise AllocationError(f"An allocation needs {name} for {_names(ROLES)}, but has {_names(roles)}.")
        for role in ROLES:
            self._refuse_bad_ranks(role)
        self._refuse_bad_sharing()

    def rank_within(self, role: str, rank: int) -> int | None:
        """The position of global ``rank`` among the ranks of ``role``, or None where it has no lane for that role."""
        ranks = self.ranks[role]
        return ranks.index(rank) if rank in ranks else None

    def describe(self) -> str:
        """The allocation in one line, for the log."""
        if self.placement == "colocated":
            return f"colocated: {' and '.join(ROLES)} on {_span(self.ranks[BACKBONE])}"
        roles = [f"{role} on {_span(self.ranks[role])} ({self.layouts[role].describe()})" for role in ROLES]
        return f"separate: {'; '.join(roles)}"

    def _refuse_bad_ranks(self, role: str) -> None:
        ranks, layout = self.ranks[role], self.layouts[role]
        if list(ranks) != sorted(set(ranks)):
            raise AllocationError(f"The {role} ranks {list(ranks)} must be ascending, each named once.")
        if len(ranks) != layout.ranks:
            raise AllocationError(
                f"The {role} layout ({layout.describe()}) needs {layout.ranks} ranks, but the role has {len(ranks)}: "
                f"{list(ranks)}."
            )

    def _refuse_bad_sharing(self) -> None:
        encoder, backbone = self.ranks[ENCODER], self.ranks[BACKBONE]
        shared = sorted({*encoder} & {*backbone})
        if self.placement == "separate" and shared:
            raise AllocationError(f"Separate roles share no rank, but both roles have {_span(tuple(shared))}.")
        if self.placement == "colocated" and tuple(encoder) != tuple(backbone):
            raise AllocationError(
                f"Colocated roles have the same ranks, but the encoder has {list(encoder)} and the backbone "
                f"{list(backbone)}."
            )
        used = sorted({*encoder, *backbone})
        if used != list(range(len(used))):
            raise AllocationError(f"The ranks must run from 0 without a gap, but the roles use {used}.")
        if 0 not in backbone:
            raise AllocationError("Rank 0 must be a backbone rank, since loggers and the progress bar live there.")


def refuse_unknown_placement(placement: str) -> None:
    """Raise an AllocationError unless ``placement`` is a known one."""
    if placement not in get_args(Placement):
        raise AllocationError(f"There is no placement {placement!r}; choose from {_names(get_args(Placement))}.")


def _names(names: Mapping[str, object] | tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _span(ranks: tuple[int, ...]) -> str:
    """Ranks in words: neighbours are joined, as in ``ranks 0-2, 4-6``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(spans)}"
