"""A step program: the works of one rank, their order, and the bytes of the pool that they take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from flowtrain_lightning.compute.feature_spec import FeatureSpec, FeatureSpecs
from flowtrain_lightning.packing.policies.taking_turns import Due, taking_turns
from flowtrain_lightning.packing.role_graph import RoleGraph
from flowtrain_lightning.packing.step_graph import BatchOf, Pass, Work
from flowtrain_lightning.pool import Reservation, assign_offsets

PADDING = -1
"""Number of a batch that the plan does not have."""

_Named = TypeVar("_Named", int, tuple[int, int])


class MadeEntry(NamedTuple):
    """Rows of a batch that another one reads.

    Attributes:
        entry: its number.
        modality: of the media items that they are made of.
        rows: how many, adjacent in the batch.
        readers: role and number of the members that read them: each gives gradients back.
    """

    entry: int
    modality: str
    rows: int
    readers: tuple[tuple[str, int], ...]


class ReadEntry(NamedTuple):
    """Rows that a batch reads of another one.

    Attributes:
        entry: its number.
        modality: of the media items that they are made of.
        maker: role and number of the member that makes them.
        slices: the runs of adjacent rows that they become in the batch, one after another.
        again: where some of them go a second time, as samples have a media item in common: which of them, and the rows
            of the batch that they become.
        part: which one the rank is of the members that read it.
        answers: of the batches of the rank that read it, this is the last one, which gives gradients back for all; and
            of ranks that have the same gradients, this is the one that does.
        early: batches of an earlier position read it, too, so it is not left in the pool until this one's turn.
    """

    entry: int
    modality: str
    maker: tuple[str, int]
    slices: tuple[slice, ...]
    again: tuple[tuple[slice, slice], ...] = ()
    part: int = 0
    answers: bool = True
    early: bool = False

    @property
    def rows(self) -> int:
        """Their number."""
        return sum(run.stop - run.start for run in self.slices)


@dataclass(frozen=True)
class RankBatch:
    """One batch of a role of this rank: what it reads, and who reads it.

    Attributes:
        number: which of the rank's batches of this role it is; ``PADDING`` for one that is computed for nothing, since
            other ranks of the role have a batch then.
        made: its entries, in the order of its rows.
        read: those that it reads, in the order in which their makers put them.
        rows_read: modality -> rows in all, in the order in which its media items appear in the batch.
        recomputes: nothing is kept of its forward, which runs again before its backward.
        moves: what its forward keeps lies in host memory until its backward.
        chunk: which run of layers of this rank's stage computes it.
    """

    number: int
    made: tuple[MadeEntry, ...] = ()
    read: tuple[ReadEntry, ...] = ()
    rows_read: Mapping[str, int] = field(default_factory=dict)
    recomputes: bool = False
    moves: bool = False
    chunk: int = 0


@dataclass(frozen=True)
class Lane:
    """Works that a rank does one after another.

    Attributes:
        roles: for which it does it.
        works: in order.
    """

    roles: tuple[str, ...]
    works: tuple[Work, ...]


@dataclass(frozen=True)
class RankRole:
    """A rank's part in one of its roles.

    Attributes:
        role: its name.
        member: which one the rank belongs to.
        batches: by their place in the member's order; where members meet, a place for every turn of any of them.
        passes: forwards and backwards of these, in order.
        due: the position of each batch's first readers; of a role that reads, its own.
        until: the position of the last microbatches that go forward before the gradients of each batch come; of a batch
            that nobody reads, its own.
        reads: rows of other roles.
        makes: rows that other roles, or its next stage, read.
    """

    role: str
    member: int
    batches: Mapping[int, RankBatch]
    passes: tuple[Pass, ...]
    due: tuple[int, ...]
    until: tuple[int, ...] = ()
    reads: bool = False
    makes: bool = False

    def position_of(self, work: Work) -> int:
        """Of the microbatches before which a forward goes, and after which a backward."""
        return (self.due if work.kind == "forward" else self.until)[work.batch.number]

    @property
    def gives_back(self) -> bool:
        """Its batches read rows, of other roles or of its stage before, to which their backwards give gradients."""
        return any(batch.read for batch in self.batches.values())

    def works(self, trains: bool) -> list[Work]:
        """Its works in order, forwards alone where it does not train."""
        kinds = [(kind, place) for kind, place in self.passes if trains or kind == "forward"]
        return [Work(BatchOf(self.role, self.member, place), kind) for kind, place in kinds]


@dataclass(frozen=True)
class StepProgram:
    """The work of one rank in one step. A pure function of plan and settings, so it can be made ahead of the step.

    Attributes:
        roles: those of this rank, by name, in order of precedence.
        entry_rows: for each member that is read the modality of each of its batches and the rows of its entries, for
            what the pool must hold.
        modalities: of all media items of the step, by name.
        positions: microbatches of each member of the trunk.
        read_per_rank: for how many roles that are read a rank works at most.
        reading_per_rank: for how many roles that read, be it of their stage before, a rank works at most.
        in_turns: the order of all passes of this rank's roles that encode, where some role needs other ranks to compute
            and this rank has several. None lets it do what it can of the first role before it turns to the next.
        holds_all: the pool has bytes for all that a rank puts in the step, on every rank: one that waits for others
            inside of a computation takes nothing out of it meanwhile, and must not keep them from coming.
        read_rows: where that is so, for each member that reads the modalities and rows of the entries that it reads.
        searched: the order of all passes of this rank's roles, where one order of all works of the step was searched.
        row_bytes: what the choice of what each batch keeps rests on; see `ActivationCount`.
    """

    roles: Mapping[str, RankRole]
    entry_rows: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    modalities: tuple[str, ...]
    positions: int
    read_per_rank: int = 1
    reading_per_rank: int = 1
    in_turns: tuple[Work, ...] | None = None
    holds_all: bool = False
    read_rows: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...] = ()
    searched: tuple[Work, ...] = ()
    row_bytes: Mapping[str, float] = field(default_factory=dict)
    _sizes: dict[frozenset[tuple[str, FeatureSpec]], PoolDemand] = field(default_factory=dict)

    def lanes(self, trained: Collection[str]) -> list[Lane]:
        """This rank's works, by lanes in order of precedence.

        Args:
            trained: roles that have backwards in this step.
        """
        if self.searched:  # nothing has to be kept of what is frozen, so it comes first
            first = [role for role, each in self.roles.items() if role not in trained and not each.reads]
            frozen = [work for role in first for work in sorted(self.roles[role].works(trains=False))]
            left = [work for work in self.searched if work.batch.role not in first]
            runs = [work for work in left if work.kind == "forward" or work.batch.role in trained]
            return [Lane(tuple(self.roles), (*frozen, *runs))]
        works = {role: each.works(role in trained) for role, each in self.roles.items()}
        if self.in_turns is None:
            return [Lane((role,), tuple(of_role)) for role, of_role in works.items()]
        producers = {role: each for role, each in self.roles.items() if not each.reads}
        reading = [each for each in self.roles.values() if each.reads]
        # What is read of a role that reads is answered between its forward and its backward.
        at_position: list[list[Work]] = [[] for _ in range(self.positions)]
        for passes in ("forward", "both", "behind"):
            for each in reading:
                position = 0  # what is no forward goes behind the last one before it
                for work in works[each.role]:
                    position = each.position_of(work) if work.kind == "forward" else position
                    kind = "forward" if work.kind == "forward" else "behind"
                    if passes == (kind if each.makes else "both"):
                        at_position[position].append(work)
        frozen = [work for work in self.in_turns if work.batch.role not in trained and work.kind == "forward"]
        due = [
            (Due(work.kind, producers[work.batch.role].position_of(work)), work)
            for work in self.in_turns
            if work.batch.role in trained
        ]
        # Nothing has to be kept of what is frozen, so it comes first.
        return [Lane((*producers, *(self.roles.keys() - producers)), (*frozen, *taking_turns(due, at_position)))]

    def without_behind(self, graph: RoleGraph) -> StepProgram:
        """The same without the roles behind the trunk, where nothing is generated."""
        roles = {role: each for role, each in self.roles.items() if role not in graph.behind}
        if graph.trunk in roles:
            trunk = roles[graph.trunk]
            batches = {place: replace(batch, made=()) for place, batch in trunk.batches.items()}
            roles[graph.trunk] = replace(trunk, batches=batches, makes=False)
        modalities = tuple(name for name in self.modalities if name not in graph.generated)
        encoded = tuple(tuple(each for each in own if each[0] in modalities) for own in self.entry_rows)
        read = tuple(tuple(each for each in own if each[0] in modalities) for own in self.read_rows)
        return replace(self, roles=roles, modalities=modalities, entry_rows=encoded, read_rows=read, _sizes={})

    def without(self, modality: str) -> StepProgram:
        """The same without the rows of a modality."""

        def left(batch: RankBatch) -> RankBatch:
            made = tuple(each for each in batch.made if each.modality != modality)
            read = tuple(each for each in batch.read if each.modality != modality)
            rows = {name: count for name, count in batch.rows_read.items() if name != modality}
            return replace(batch, made=made, read=read, rows_read=rows)

        roles = {}
        for role, each in self.roles.items():
            batches = {place: left(batch) for place, batch in each.batches.items()}
            roles[role] = replace(each, batches=batches, makes=any(batch.made for batch in batches.values()))
        made = tuple(tuple(each for each in own if each[0] != modality) for own in self.entry_rows)
        read = tuple(tuple(each for each in own if each[0] != modality) for own in self.read_rows)
        left_over = tuple(name for name in self.modalities if name != modality)
        return replace(self, roles=roles, modalities=left_over, entry_rows=made, read_rows=read, _sizes={})

    def pool_demand(self, specs: FeatureSpecs) -> PoolDemand:
        """The bytes that the step needs of the pool; worked out once.

        Args:
            specs: modality -> what a row of its features is, for all modalities of the step.
        """
        known = frozenset(specs.items())
        if known not in self._sizes:
            self._sizes[known] = PoolDemand(self, specs)
        return self._sizes[known]


class PoolDemand:
    """The bytes that a step needs of the pool.

    Attributes:
        least: bytes with which the fixed order of the step cannot block, on any rank. Gradients have as many bytes of
            their own; as fewer of them are held together than of features, it is enough.
        ample: bytes with which no rank waits for room inside the step: all features of the busiest member that is read.
        features: role of this rank -> number of each entry that it makes -> what is reserved for it, in the order in
            which they are put.
        gradients: the same for the gradients that it returns as one that reads, by number and part of the entry.
    """

    def __init__(self, program: StepProgram, specs: FeatureSpecs) -> None:
        sized = [[specs[modality].entry_nbytes(rows) for modality, rows in of_rank] for of_rank in program.entry_rows]
        # Those of one role lie apart from those of another, since the order of the two is a matter of time.
        together = max(program.read_per_rank, program.reading_per_rank)
        self.ample = together * max((sum(map(sum, of_rank)) for of_rank in sized), default=0)
        if program.holds_all:
            # Features of its own on one side, gradients of all that it reads on the other.
            read_by = (sum(sum(specs[name].entry_nbytes(rows)) for name, rows in each) for each in program.read_rows)
            self.least = self.ample = max(self.ample, program.reading_per_rank * max(read_by, default=0))
        else:
            each_least = (assign_offsets(_held_by_batch(of_rank)).capacity for of_rank in sized)
            self.least = together * max(each_least, default=0)
        self.features = {name: _reserved(role, specs) for name, role in program.roles.items()}
        answering = {name: role for name, role in program.roles.items() if role.reads or role.gives_back}
        self.gradients = {name: _answers(role, specs) for name, role in answering.items()}
        if program.holds_all:
            self.features = {role: _held_to_the_end(reserved) for role, reserved in self.features.items()}
            self.gradients = {role: _held_to_the_end(reserved) for role, reserved in self.gradients.items()}


def _nbytes(entries: Sequence[MadeEntry | ReadEntry], specs: FeatureSpecs) -> list[int]:
    """Bytes of the pool that each entry takes."""
    return [specs[each.modality].entry_nbytes([each.rows])[0] for each in entries]


def _reserved(role: RankRole, specs: FeatureSpecs) -> dict[int, Reservation]:
    """Reservations for the entries that a role makes."""
    made = [batch.made for batch in role.batches.values() if batch.made]
    own = _held_by_batch([_nbytes(of_batch, specs) for of_batch in made])
    return dict(zip([each.entry for of_batch in made for each in of_batch], own, strict=True))


def _answers(role: RankRole, specs: FeatureSpecs) -> dict[tuple[int, int], Reservation]:
    """Reservations for the gradients that a role returns."""
    read = [each for batch in role.batches.values() for each in batch.read if each.answers]
    # Who made rows copies gradients whenever it has its turn: none is held until another one was put.
    return {
        (each.entry, each.part): Reservation(size, released_after=number)
        for number, (each, size) in enumerate(zip(read, _nbytes(read, specs), strict=True))
    }


def _held_to_the_end(reserved: Mapping[_Named, Reservation]) -> dict[_Named, Reservation]:
    """Each with bytes of its own."""
    return {entry: Reservation(each.nbytes, released_after=len(reserved) - 1) for entry, each in reserved.items()}


def _held_by_batch(batches: Iterable[Sequence[int]]) -> list[Reservation]:
    """Reservations for the entries of a member that encodes, of so many bytes each.

    A batch is put as a whole, so its entries are held together. No other is: readers take features in the order in
    which their makers publish them (the invariant of ``StepPlan.batches``), copy them when they arrive and
    release them at once, so all that was published before a waiting batch is read without it. It is the same of rows
    that microbatches make: of all that wait for room take one of the lowest position; those who read lower ones have
    all that they take, and come to its own.
    """
    reserved: list[Reservation] = []
    for batch in batches:
        last = len(reserved) + len(batch) - 1
        reserved += [Reservation(nbytes, released_after=last) for nbytes in batch]
    return reserved
