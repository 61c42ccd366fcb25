"""What a user says about the allocation, and whether it can be done: refused before any rank is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowtrain_lightning.allocator import Allocation, AllocationError, Layout, Placement, default_allocation
from flowtrain_lightning.allocator.plan_file import read_plan
from flowtrain_lightning.allocator.roles import ROLES
from flowtrain_lightning.profiling import Profile, read_profile

AUTO = "auto"
OFF = "off"


@dataclass(frozen=True)
class Request:
    """What a user says about the allocation; None leaves it open.

    Attributes:
        allocation: all of it.
        source: where ``allocation`` is from, for messages.
        placement: of the rule.
        encoder_ranks: of the rule.
        profile: ``"auto"`` measures the module, ``"off"`` does not; or what was measured before.
    """

    allocation: Allocation | None
    source: str
    placement: Placement | None
    encoder_ranks: int | None
    profile: Profile | str

    def answer(self, ranks: int, nodes: int = 1) -> Allocation | None:
        """The allocation that follows from the request alone, or None where there is something to find out.

        Args:
            ranks: of the run.
            nodes: on which they run, as many on each.

        Raises:
            AllocationError: with what was asked for and what there is.
        """
        if self.allocation is not None:
            refuse_other_ranks(self.allocation, ranks, self.source)
            refuse_what_cannot_run(self.allocation, self.source)
            return self.allocation
        if ranks == 1 or self.placement is not None or self.encoder_ranks is not None:
            return default_allocation(ranks, self.placement, self.encoder_ranks, ranks // nodes)
        return None


def make_request(
    allocation: Allocation | str | Path | None,
    placement: Placement | None,
    encoder_ranks: int | None,
    profile: str | Path,
) -> Request:
    """Read what was given, and refuse what contradicts itself.

    Raises:
        AllocationError: a file that is no plan, or two settings that say the same thing.
        ProfileError: a file that is no profile.
    """
    file = None if str(profile) in (AUTO, OFF) else str(profile)
    if allocation is not None:
        others = {"placement": placement, "encoder_ranks": encoder_ranks, "profile": file}
        for name, value in others.items():
            if value is not None:
                raise AllocationError(
                    f"Both allocation and {name}={str(value)!r} are given, but an allocation says everything; leave "
                    f"one of the two out."
                )
    elif file is not None and (placement is not None or encoder_ranks is not None):
        raise AllocationError(
            f"profile={file!r} is there to plan the allocation by, but placement={placement!r} and "
            f"encoder_ranks={encoder_ranks!r} leave nothing to plan; leave the profile out, or these two."
        )
    costs = str(profile) if file is None else read_profile(Path(file))
    if allocation is None or isinstance(allocation, Allocation):
        return Request(allocation, "The given allocation", placement, encoder_ranks, costs)
    return Request(read_plan(Path(allocation)), str(allocation), placement, encoder_ranks, costs)


def refuse_other_ranks(allocation: Allocation, ranks: int, source: str) -> None:
    """Raise an AllocationError unless the allocation is for so many ranks."""
    planned = len(set().union(*allocation.ranks.values()))
    if planned != ranks:
        raise AllocationError(
            f"{source} is for {_ranks(planned)}, but the Trainer starts {_ranks(ranks)}. Set Trainer(devices={planned})"
            f", on several nodes as many on each, or take a plan for {ranks}."
        )


def refuse_what_cannot_run(allocation: Allocation, source: str) -> None:
    """Raise an AllocationError for roles, layouts and placements that are planned today and not yet run."""
    if set(allocation.layouts) != set(ROLES):
        raise AllocationError(
            f"{source} has the roles {', '.join(allocation.layouts)}, but one encoder and the backbone are what runs "
            f"today; name them {' and '.join(ROLES)}."
        )
    for role, layout in allocation.layouts.items():
        if layout != Layout(data=layout.data):
            raise AllocationError(
                f"{source} gives the {role} the layout {layout.describe()}, but today every rank holds a whole copy of "
                f"its half: {Layout(data=layout.ranks).describe()}. `flowtrain plan --whole-copies` plans within that."
            )
    if allocation.placement == "mixed":
        raise AllocationError(
            f"{source} is mixed, but today every rank has both roles or each has one; take a separate or a colocated "
            "plan."
        )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
