"""What one rank does in a step and in which order: worked out from the plan, while the step before runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flowtrain_lightning.compute.compute import FeatureSpec, FeatureSpecs
from flowtrain_lightning.data import Entry, RankShard, StepPlan
from flowtrain_lightning.packing.policies.member_orders import member_orders
from flowtrain_lightning.packing.policies.taking_turns import Due, taking_turns
from flowtrain_lightning.packing.roles import BACKBONE, ENCODER
from flowtrain_lightning.packing.step_graph import BatchOf, Pass, Work
from flowtrain_lightning.pool import Reservation, assign_offsets

PADDING = -1
"""Number of a batch that the plan does not have."""


class MadeEntry(NamedTuple):
    """Rows of a batch that another one reads.

    Attributes:
        entry: its number.
        modality: of the media items that they are made of.
        rows: how many, adjacent in the batch.
        reader: the member that reads them, within its role.
    """

    entry: int
    modality: str
    rows: int
    reader: int


class ReadEntry(NamedTuple):
    """Rows that a batch reads of another one.

    Attributes:
        entry: its number.
        modality: of the media items that they are made of.
        maker: the member that makes them, counted over all encoders.
        slices: the runs of adjacent rows that they become in the batch, one after another.
    """

    entry: int
    modality: str
    maker: int
    slices: tuple[slice, ...]

    @property
    def rows(self) -> int:
        """How many they are."""
        return sum(run.stop - run.start for run in self.slices)


@dataclass(frozen=True)
class RankBatch:
    """One batch of a role of this rank: what it reads, and who reads it.

    Attributes:
        number: which of the rank's batches of this role it is; ``PADDING`` for one that is computed for nothing, since
            other ranks of the role have a batch then.
        loaded: which one it is of all that this rank has loaded.
        made: its entries, in the order of its rows.
        read: those that it reads, in the order in which their makers put them.
        rows_read: modality -> rows in all, in the order in which its media items appear in the batch.
        recomputes: nothing is kept of its forward, which runs again before its backward.
    """

    number: int
    loaded: int
    made: tuple[MadeEntry, ...] = ()
    read: tuple[ReadEntry, ...] = ()
    rows_read: Mapping[str, int] = field(default_factory=dict)
    recomputes: bool = False


@dataclass(frozen=True)
class Lane:
    """What a rank does one thing after another.

    Attributes:
        roles: for which it does it.
        works: in order.
    """

    roles: tuple[str, ...]
    works: tuple[Work, ...]


@dataclass(frozen=True)
class RankRole:
    """What a rank does for one of its roles.

    Attributes:
        role: its name.
        member: which one the rank belongs to.
        batches: by their place in the member's order; where members meet, a place for every turn of any of them.
        passes: forwards and backwards of these, in order.
        due: the position of each batch's readers; of a role that nobody reads, its own.
    """

    role: str
    member: int
    batches: Mapping[int, RankBatch]
    passes: tuple[Pass, ...]
    due: tuple[int, ...]

    def works(self, trains: bool) -> list[Work]:
        """Its works in order, forwards alone where it does not train."""
        kinds = [(kind, place) for kind, place in self.passes if trains or kind == "forward"]
        return [Work(BatchOf(self.role, self.member, place), kind) for kind, place in kinds]


@dataclass(frozen=True)
class StepProgram:
    """The work of one rank in one step. A pure function of plan and settings, so it can be made ahead of the step.

    Attributes:
        roles: those of this rank, by name, in order of precedence.
        entry_rows: for each encoder rank the modality of each of its batches and the rows of its entries, for what the
            pool must hold.
        modalities: of all media items of the step, by name.
        positions: microbatches of each backbone rank.
        encoders_per_rank: for how many encoders a rank works at most.
        in_fixed_order: this rank has two roles, of which one needs other ranks to compute. Else it does what it can of
            the first role before it turns to the next.
        holds_all: the pool has bytes for all of the step, on every rank: one that waits for others inside of a
            computation takes nothing out of it meanwhile, and must not keep them from coming.
    """

    roles: Mapping[str, RankRole]
    entry_rows: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    modalities: tuple[str, ...]
    positions: int
    encoders_per_rank: int = 1
    in_fixed_order: bool = False
    holds_all: bool = False
    _sizes: dict[frozenset[tuple[str, FeatureSpec]], PoolDemand] = field(default_factory=dict)

    def lanes(self, trained: Collection[str]) -> list[Lane]:
        """What this rank does, by lanes in order of precedence.

        Args:
            trained: roles that have backwards in this step.
        """
        works = {role: each.works(role in trained) for role, each in self.roles.items()}
        if not self.in_fixed_order:
            return [Lane((role,), tuple(of_role)) for role, of_role in works.items()]
        consumer, producer = self.roles.values()  # the backbone comes first
        at_position: list[list[Work]] = [[] for _ in range(self.positions)]
        for work in works[consumer.role]:
            at_position[consumer.due[work.batch.number]].append(work)
        due = [(Due(work.kind, producer.due[work.batch.number]), work) for work in works[producer.role]]
        order = taking_turns(due, at_position, trains=producer.role in trained)
        return [Lane((producer.role, consumer.role), tuple(order))]

    def pool_demand(self, specs: FeatureSpecs) -> PoolDemand:
        """What the step asks of the pool; worked out once.

        Args:
            specs: modality -> what a row of its features is, for all modalities of the step.
        """
        known = frozenset(specs.items())
        if known not in self._sizes:
            self._sizes[known] = PoolDemand(self, specs)
        return self._sizes[known]


class PoolDemand:
    """What a step asks of the pool, in bytes.

    Attributes:
        least: bytes with which the fixed order of the step cannot block, on any rank. Gradients have as many bytes of
            their own; as fewer of them are held together than of features, it is enough.
        ample: bytes with which no rank waits for room inside the step: all features of the busiest encoder rank.
        features: role of this rank -> number of each entry that it makes -> what is reserved for it, in the order in
            which they are put.
        gradients: the same for the gradients that this rank returns, of all its roles.
    """

    def __init__(self, program: StepProgram, specs: FeatureSpecs) -> None:
        sized = [[specs[modality].entry_nbytes(rows) for modality, rows in of_rank] for of_rank in program.entry_rows]
        # Those of one encoder lie apart from those of another, since the order of the two is a matter of time.
        together = program.encoders_per_rank
        self.ample = together * max((sum(map(sum, of_rank)) for of_rank in sized), default=0)
        if not program.holds_all:
            each_least = (assign_offsets(_held_by_batch(of_rank)).capacity for of_rank in sized)
            self.least = together * max(each_least, default=0)
        else:
            self.least = self.ample = sum(sum(map(sum, of_rank)) for of_rank in sized)
        self.features = {name: _reserved(role, specs) for name, role in program.roles.items()}
        read = [each for role in program.roles.values() for batch in role.batches.values() for each in batch.read]
        nbytes = _nbytes(read, specs)
        # Who made rows copies gradients whenever it has its turn: none is held until another one was put.
        self.gradients: dict[int, Reservation] = {
            each.entry: Reservation(size, released_after=number)
            for number, (each, size) in enumerate(zip(read, nbytes, strict=True))
        }
        if program.holds_all:
            self.features = {role: _held_to_the_end(reserved) for role, reserved in self.features.items()}
            self.gradients = _held_to_the_end(self.gradients)


def make_program(plan: StepPlan, shard: RankShard, kept_batches: int) -> StepProgram:
    """The work of one rank.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        kept_batches: encoder batches per rank whose activations may be kept at a time.
    """
    of_batch: list[dict[int, list[int]]] = [{} for _ in plan.encoder_batches]
    of_microbatch: dict[int, list[int]] = {}
    for number, entry in enumerate(plan.entries):
        of_batch[entry.encoder_rank].setdefault(entry.encoder_batch, []).append(number)
        if entry.backbone_rank == shard.backbone_rank:
            of_microbatch.setdefault(entry.microbatch, []).append(number)
    roles = []
    if shard.backbone_rank is not None:
        roles.append(_reading_role(plan, shard, of_microbatch))
    loaded = 0
    for member in shard.encoder_members:
        roles.append(_encoding_role(plan, shard, member, of_batch[member], kept_batches, loaded))
        loaded += len(plan.encoder_batches[member])
    rows = tuple(tuple(_rows_of(plan, numbers) for numbers in of_rank.values()) for of_rank in of_batch)
    # A role that waits for bytes would keep the other from its turn, or other tensor ranks from their encoder batch.
    some_in_fixed_order = bool(shard.colocated_lanes) and shard.in_fixed_order
    return StepProgram(
        {role.role: role for role in roles},
        rows,
        tuple(sorted({entry.modality for entry in plan.entries})),
        len(plan.microbatches[0]),
        shard.encoders_per_rank,
        in_fixed_order=len(roles) > 1 and shard.in_fixed_order,
        holds_all=some_in_fixed_order or shard.meeting(ENCODER).ranks > 1,
    )


def _reading_role(plan: StepPlan, shard: RankShard, entries: Mapping[int, Sequence[int]]) -> RankRole:
    """What a rank does for the backbone: each microbatch backward at once, as nobody waits for what it makes.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        entries: number of each of its microbatches -> its entries.
    """
    assert shard.backbone_rank is not None
    members = plan.microbatches[shard.backbone_rank]
    pads = bool(shard.meeting(BACKBONE).passes)
    numbers = [number for number, samples in enumerate(members) if len(samples) or pads]
    batches = {number: _microbatch(plan, number, entries.get(number, [])) for number in numbers}
    passes: list[Pass] = [(kind, number) for number in numbers for kind in ("forward", "backward")]  # type: ignore[misc]
    return RankRole(BACKBONE, shard.backbone_rank, batches, tuple(passes), tuple(range(len(members))))


def _encoding_role(
    plan: StepPlan,
    shard: RankShard,
    member: int,
    own: Mapping[int, Sequence[int]],
    kept_batches: int,
    loaded: int,
) -> RankRole:
    """What a rank does for an encoder.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        member: of the encoder, counted over all.
        own: number of each of its encoder batches -> its entries.
        kept_batches: encoder batches whose activations may be kept at a time.
        loaded: batches of other encoders that this rank has loaded before these.
    """
    (order,) = member_orders(
        plan,
        [member],
        kept_batches,
        meet=bool(shard.meeting(ENCODER).passes),
        colocated=[member] if shard.backbone_rank is not None else [],
        in_fixed_order=shard.in_fixed_order,
    )
    number_of = {turn: number for number, turn in enumerate(plan.encoder_turns[member])}
    batches: dict[int, RankBatch] = {}
    for place in dict.fromkeys(place for _, place in order.passes):
        number = number_of.get(order.turns[place], PADDING)
        entries = ((entry, plan.entries[entry]) for entry in own.get(number, ()))
        made = tuple(MadeEntry(entry, found.modality, found.rows, found.backbone_rank) for entry, found in entries)
        batches[place] = RankBatch(number, loaded + number, made, recomputes=place in order.recomputed)
    due = tuple(position for position, _ in order.turns)
    return RankRole(shard.encoder_role(member), member, batches, order.passes, due)


def _rows_of(plan: StepPlan, numbers: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The modality of an encoder batch of these entries, and their rows."""
    return plan.entries[numbers[0]].modality, tuple(plan.entries[number].rows for number in numbers)


def _nbytes(entries: Sequence[MadeEntry | ReadEntry], specs: FeatureSpecs) -> list[int]:
    """Bytes of the pool that each entry takes."""
    return [specs[each.modality].entry_nbytes([each.rows])[0] for each in entries]


def _microbatch(plan: StepPlan, number: int, numbers: Sequence[int]) -> RankBatch:
    entries = {entry: plan.entries[entry] for entry in numbers}
    rows: dict[str, int] = {}
    slices: dict[int, tuple[slice, ...]] = {}
    for modality in sorted({entry.modality for entry in entries.values()}):  # as one process has them, by name
        own = {entry: found for entry, found in entries.items() if found.modality == modality}
        rows[modality], found_slices = feature_slices(plan, list(own.values()))
        slices |= zip(own, found_slices, strict=True)
    read = (ReadEntry(entry, found.modality, found.encoder_rank, slices[entry]) for entry, found in entries.items())
    return RankBatch(number, number, read=tuple(read), rows_read=rows)


def feature_slices(plan: StepPlan, entries: Sequence[Entry]) -> tuple[int, list[tuple[slice, ...]]]:
    """Where the features of one microbatch's entries belong.

    Args:
        plan: the step's plan.
        entries: all entries of one microbatch that are of one modality.

    Returns:
        rows of features of the modality, whose media items come in order of appearance; and for each entry the runs of
        adjacent rows that its own rows become, one after another.
    """
    members = plan.microbatches[entries[0].backbone_rank][entries[0].microbatch]
    sizes = plan.sizes
    media = np.concatenate([np.arange(sizes.media_start[s], sizes.media_start[s + 1]) for s in members])
    if sizes.media_modality is not None:
        media = media[sizes.media_modality[media] == entries[0].modality]
    ends = np.cumsum(sizes.media_rows[media])
    start = dict(zip(media.tolist(), (ends - sizes.media_rows[media]).tolist(), strict=True))
    return int(ends[-1]), [
        _joined([(start[m], int(sizes.media_rows[m])) for m in entry.media.tolist()]) for entry in entries
    ]


def _joined(runs: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    """Starts and lengths as slices; adjacent ones become one."""
    joined: list[slice] = []
    for start, length in runs:
        if joined and joined[-1].stop == start:
            start, length = joined[-1].start, length + start - joined.pop().start
        joined.append(slice(start, start + length))
    return tuple(joined)


def _reserved(role: RankRole, specs: FeatureSpecs) -> dict[int, Reservation]:
    """What is reserved for the entries that a role makes."""
    made = [batch.made for batch in role.batches.values() if batch.made]
    own = _held_by_batch([_nbytes(of_batch, specs) for of_batch in made])
    return dict(zip([each.entry for of_batch in made for each in of_batch], own, strict=True))


def _held_to_the_end(reserved: Mapping[int, Reservation]) -> dict[int, Reservation]:
    """Each with bytes of its own."""
    return {entry: Reservation(each.nbytes, released_after=len(reserved) - 1) for entry, each in reserved.items()}


def _held_by_batch(batches: Iterable[Sequence[int]]) -> list[Reservation]:
    """What is reserved for the entries of an encoder rank, of so many bytes each.

    A batch is put as a whole, so its entries are held together. No other is: readers take features in the order in
    which encoder ranks publish them (the invariant of ``StepPlan.encoder_batches``), copy them when they arrive and
    release them at once, so all that was published before a waiting batch is read without it.
    """
    reserved: list[Reservation] = []
    for batch in batches:
        last = len(reserved) + len(batch) - 1
        reserved += [Reservation(nbytes, released_after=last) for nbytes in batch]
    return reserved
