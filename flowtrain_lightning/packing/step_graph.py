"""A step as a graph of works: what each needs of others, which begin together, and in which order ranks come to them.

Nothing here names a role. A work is what the ranks of one member do with one batch of one role, in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "weights"]
"""What is done with a batch. Gradients of weights are a work of their own where a backward leaves them for later."""

Pass = tuple[Kind, int]
"""What is done with a member's batch of this number."""


class Meeting(NamedTuple):
    """Ranks of a role that begin a pass together, since each needs the others in it.

    Attributes:
        ranks: of one member: they share all of its work.
        members: neighbouring members that need each other in ``passes``.
        passes: where members do. In these, a member runs an empty batch where others have one and it has none.
    """

    ranks: int = 1
    members: int = 1
    passes: tuple[Kind, ...] = ()

    @property
    def binds(self) -> bool:
        """A rank needs another one, so that all must come to their passes in one order."""
        return self.ranks > 1 or bool(self.passes)

    @property
    def together(self) -> int:
        """Neighbouring members that begin a pass together; 1 where each goes at its own pace."""
        return self.members if self.passes else 1


def any_binds(meets: Mapping[str, Meeting]) -> bool:
    """Whether ranks need each other in a pass of some role: then ranks of several roles have a fixed order."""
    return any(meeting.binds for meeting in meets.values())


class BatchOf(NamedTuple):
    """A batch of a step.

    Attributes:
        role: whose it is.
        member: which data-parallel member of the role.
        number: its place in the member's order.
    """

    role: str
    member: int
    number: int


class Work(NamedTuple):
    """The work of one member's ranks on one batch, together.

    Attributes:
        batch: the batch.
        kind: what is done.
    """

    batch: BatchOf
    kind: Kind


class BlockedError(ValueError):
    """No rank can go on, for each waits for what another one does later."""

    def __init__(self) -> None:
        super().__init__(
            "No rank of the step can go on: each waits for what another one does later. Allow more batches in flight, "
            "or mark some as recomputed."
        )


@dataclass(frozen=True)
class StepGraph:
    """All works of a step. Works go by their numbers: their places in ``works``.

    Attributes:
        works: of all ranks. One that stands in no lane is of no rank: rows on their way from one to another.
        needs: ``[works]`` the works whose results each one takes.
        lanes: rank -> its lanes, in order of precedence: the works of each, in order. A rank does the next work of the
            first lane that can go on. A work of several ranks stands in a lane of each. A rank whose order is fixed has
            one lane.
        meetings: works that begin together, once all of them have what they need and all of their ranks have come.
    """

    works: Sequence[Work]
    needs: Sequence[Sequence[int]]
    lanes: Mapping[int, Sequence[Sequence[int]]]
    meetings: Sequence[Sequence[int]] = ()

    @cached_property
    def ranks(self) -> list[list[int]]:
        """``[works]`` the ranks that do each one."""
        found: list[list[int]] = [[] for _ in self.works]
        for rank, lanes in self.lanes.items():
            for lane in lanes:
                for work in lane:
                    found[work].append(rank)
        return found

    @cached_property
    def takers(self) -> list[list[int]]:
        """``[works]`` the works that take the result of each one."""
        found: list[list[int]] = [[] for _ in self.works]
        for work, needs in enumerate(self.needs):
            for needed in needs:
                found[needed].append(work)
        return found

    @cached_property
    def beginnings(self) -> tuple[list[int], list[list[int]]]:
        """``[works]`` the number of the beginning that each one is part of; and the works of each beginning."""
        of_work = [-1] * len(self.works)
        together = [list(meeting) for meeting in self.meetings]
        for number, meeting in enumerate(together):
            for work in meeting:
                of_work[work] = number
        for work, number in enumerate(of_work):
            if number < 0:
                of_work[work] = len(together)
                together.append([work])
        return of_work, together
