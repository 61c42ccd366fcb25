"""Which ranks play which role, and in which layout: the answer of every allocator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal, get_args

from flowtrain_lightning.allocator.layout import Layout
from flowtrain_lightning.allocator.roles import BACKBONE, ROLES

Placement = Literal["separate", "colocated", "mixed"]
"""``"separate"`` gives every rank one role, ``"colocated"`` gives every rank all of them, ``"mixed"`` gives every rank
the encoders and some the backbone too."""


class AllocationError(ValueError):
    """The ranks cannot be divided among the roles in this way."""


@dataclass(frozen=True)
class Allocation:
    """A layout and ranks for every role: the backbone and at least one encoder.

    Attributes:
        placement: whether roles share ranks.
        layouts: role -> its layout.
        ranks: role -> its global ranks, ascending. Together the roles use the ranks from 0 on without a gap, and
            rank 0 is a backbone rank, since loggers and the progress bar live there.

    Raises:
        AllocationError: a role is missing, or the ranks break what is said above.
    """

    placement: Placement
    layouts: Mapping[str, Layout]
    ranks: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        refuse_unknown_placement(self.placement, get_args(Placement))
        for name, roles in (("layouts", self.layouts), ("ranks", self.ranks)):
            if BACKBONE not in roles or len(roles) < len(ROLES) or set(roles) != set(self.layouts):
                known = ROLES if name == "layouts" else tuple(self.layouts)
                raise AllocationError(
                    f"An allocation needs {name} for {_names(known)}, but has {_names(tuple(roles))}."
                )
        for role in self.layouts:
            self._refuse_bad_ranks(role)
        self._refuse_bad_sharing()

    def rank_within(self, role: str, rank: int) -> int | None:
        """The position of global ``rank`` among the ranks of ``role``, or None where it has no lane for that role."""
        ranks = self.ranks[role]
        return ranks.index(rank) if rank in ranks else None

    def describe(self) -> str:
        """The allocation in one line, for the log."""
        if self.placement == "colocated" and all(_is_plain(layout) for layout in self.layouts.values()):
            return f"colocated: {' and '.join(self.layouts)} on {_span(self.ranks[BACKBONE])}"
        roles = [f"{role} on {_span(self.ranks[role])} ({layout.describe()})" for role, layout in self.layouts.items()]
        return f"{self.placement}: {'; '.join(roles)}"

    def state_dict(self) -> dict[str, Any]:
        """The same in JSON types."""
        return {
            "placement": self.placement,
            "layouts": {role: asdict(layout) for role, layout in self.layouts.items()},
            "ranks": {role: list(ranks) for role, ranks in self.ranks.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Allocation:
        """The allocation that was saved; without layouts, of roles whose ranks hold whole copies."""
        ranks = {role: tuple(numbers) for role, numbers in state["ranks"].items()}
        saved = state.get("layouts") or {role: {"data": len(numbers)} for role, numbers in ranks.items()}
        return cls(state["placement"], {role: Layout(**degrees) for role, degrees in saved.items()}, ranks)

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
        everyone = sorted(set().union(*self.ranks.values()))
        for role, other in combinations(self.layouts, 2):
            shared = sorted({*self.ranks[role]} & {*self.ranks[other]})
            if self.placement == "separate" and shared:
                which = "both roles have" if len(self.ranks) == 2 else f"{role!r} and {other!r} both have"
                raise AllocationError(f"Separate roles share no rank, but {which} {_span(tuple(shared))}.")
            if self.placement == "colocated" and tuple(self.ranks[role]) != tuple(self.ranks[other]):
                raise AllocationError(
                    f"Colocated roles have the same ranks, but the {role} has {list(self.ranks[role])} and the {other} "
                    f"{list(self.ranks[other])}."
                )
        if everyone != list(range(len(everyone))):
            raise AllocationError(f"The ranks must run from 0 without a gap, but the roles use {everyone}.")
        if self.placement == "mixed":
            for role in set(self.ranks) - {BACKBONE}:
                if list(self.ranks[role]) != everyone:
                    raise AllocationError(
                        f"In a mixed allocation every rank encodes, but the {role} has {_span(self.ranks[role])}."
                    )
        if 0 not in self.ranks[BACKBONE]:
            raise AllocationError("Rank 0 must be a backbone rank, since loggers and the progress bar live there.")


def refuse_unknown_placement(placement: str, known: tuple[str, ...]) -> None:
    """Raise an AllocationError unless ``placement`` is a known one."""
    if placement not in known:
        raise AllocationError(f"There is no placement {placement!r}; choose from {_names(known)}.")


def _is_plain(layout: Layout) -> bool:
    return layout == Layout(data=layout.data)


def _names(names: tuple[str, ...]) -> str:
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
