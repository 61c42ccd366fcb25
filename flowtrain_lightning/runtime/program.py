"""What one rank does in a step and in which order: worked out from the plan, while the step before runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowtrain_lightning.compute.compute import FeatureSpec
from flowtrain_lightning.data import Entry, RankShard, StepPlan
from flowtrain_lightning.packing.policies.member_orders import member_orders
from flowtrain_lightning.packing.policies.taking_turns import LaneOrder
from flowtrain_lightning.packing.roles import BACKBONE, ENCODER
from flowtrain_lightning.packing.step_graph import Pass
from flowtrain_lightning.pool import Reservation, assign_offsets

PADDING = -1
"""Number of an encoder batch that the plan does not have."""


@dataclass(frozen=True)
class EncoderBatchWork:
    """One encoder batch of this rank: what of it goes where.

    Attributes:
        number: which of the rank's encoder batches it is; ``PADDING`` for one that is computed for nothing, since other
            ranks of the role have a batch then.
        entries: numbers of its entries, in the order of its rows.
        rows: rows of features of each entry.
        readers: for each entry, who reads it, counted within the backbone role.
        recomputes: nothing is kept of its forward, which runs again before its backward.
    """

    number: int
    entries: tuple[int, ...]
    rows: list[int]
    readers: tuple[int, ...]
    recomputes: bool


@dataclass(frozen=True)
class MicrobatchWork:
    """One microbatch of this rank: which features it needs, and where they belong.

    Attributes:
        number: its position in this rank's order.
        rows: modality -> rows of features in all, in the order in which its media items appear in the microbatch.
        slices: number of an entry -> the runs of adjacent rows that its own rows become, one after another.
        owners: number of an entry -> who encodes it, counted over all encoders.
        modalities: number of an entry -> the modality of its media items.
    """

    number: int
    rows: dict[str, int]
    slices: dict[int, tuple[slice, ...]]
    owners: dict[int, int]
    modalities: dict[int, str]


@dataclass(frozen=True)
class StepProgram:
    """The work of one rank in one step. A pure function of plan and settings, so it can be made ahead of the step.

    Attributes:
        encoder_batches: those of this rank that hold media items, by number; empty without an encoder lane. Where
            encoder ranks share weights, by turn: one for every turn of which any encoder rank has media items.
        encoder_order: the order of an encoder that trains. One that does not runs forwards only.
        microbatches: those of this rank; empty without a backbone lane.
        last_microbatch: number of the last one that is not empty; -1 where all are.
        entry_rows: for each encoder rank the rows of the entries of each of its batches, for what the pool must hold.
        modalities: of all media items of the step, by name.
        lane_order: which lane works next, on a rank of two roles of which one shares weights with other ranks. None
            where lanes take turns as they can go on.
        holds_all: the pool has bytes for all of the step, on every rank: one that waits for others inside of a
            computation takes nothing out of it meanwhile, and must not keep them from coming.
    """

    encoder_batches: dict[int, EncoderBatchWork]
    encoder_order: tuple[Pass, ...]
    microbatches: tuple[MicrobatchWork, ...]
    last_microbatch: int
    entry_rows: tuple[tuple[tuple[int, ...], ...], ...]
    modalities: tuple[str, ...]
    lane_order: LaneOrder | None = None
    holds_all: bool = False
    _sizes: dict[FeatureSpec, PoolDemand] = field(default_factory=dict)

    def pool_demand(self, spec: FeatureSpec) -> PoolDemand:
        """What the step asks of the pool where a row of features is ``spec``; worked out once."""
        demand = self._sizes.get(spec)
        if demand is None:
            demand = self._sizes[spec] = PoolDemand(self, spec)
        return demand


class PoolDemand:
    """What a step asks of the pool, in bytes.

    Attributes:
        least: bytes with which the fixed order of the step cannot block, on any rank. Gradients have as many bytes of
            their own; as fewer of them are held together than of features, it is enough.
        ample: bytes with which no rank waits for room inside the step: all features of the busiest encoder rank.
        features: number of an entry of this rank -> what is reserved for it, in the order in which they are put.
        gradients: the same for the gradients that this rank returns.
    """

    def __init__(self, program: StepProgram, spec: FeatureSpec) -> None:
        sized = [[spec.entry_nbytes(batch) for batch in of_rank] for of_rank in program.entry_rows]
        self.ample = max((sum(map(sum, of_rank)) for of_rank in sized), default=0)
        if not program.holds_all:
            self.least = max((assign_offsets(_held_by_batch(of_rank)).capacity for of_rank in sized), default=0)
        else:
            self.least = self.ample = sum(sum(map(sum, of_rank)) for of_rank in sized)
        batches = program.encoder_batches.values()
        own = _held_by_batch([spec.entry_nbytes(batch.rows) for batch in batches if batch.entries])
        numbers = [entry for batch in batches for entry in batch.entries]
        self.features: dict[int, Reservation] = dict(zip(numbers, own, strict=True))
        self.gradients: dict[int, Reservation] = {}
        for microbatch in program.microbatches:
            rows = [sum(part.stop - part.start for part in parts) for parts in microbatch.slices.values()]
            for entry, nbytes in zip(microbatch.slices, spec.entry_nbytes(rows), strict=True):
                # An encoder lane copies gradients whenever it has its turn: none is held until another one was put.
                self.gradients[entry] = Reservation(nbytes, released_after=len(self.gradients))
        if program.holds_all:
            self.features, self.gradients = _held_to_the_end(self.features), _held_to_the_end(self.gradients)


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
    has_both = shard.encoder_rank is not None and shard.backbone_rank is not None
    in_fixed_order = has_both and shard.in_fixed_order
    some_in_fixed_order = bool(shard.colocated_lanes) and shard.in_fixed_order
    batches: dict[int, EncoderBatchWork] = {}
    order: tuple[Pass, ...] = ()
    encoded: tuple[int, ...] = ()
    if shard.encoder_rank is not None:
        batches, order, encoded = _encoder_work(plan, shard, of_batch[shard.encoder_rank], kept_batches)
    microbatches: tuple[MicrobatchWork, ...] = ()
    last_microbatch = -1
    if shard.backbone_rank is not None:
        members = plan.microbatches[shard.backbone_rank]
        works = (number for number, samples in enumerate(members) if len(samples) or shard.meeting(BACKBONE).passes)
        last_microbatch = max(works, default=-1)
        microbatches = tuple(_microbatch(plan, number, of_microbatch.get(number, [])) for number in range(len(members)))
    rows = tuple(
        tuple(tuple(plan.entries[entry].rows for entry in numbers) for numbers in of_rank.values())
        for of_rank in of_batch
    )
    lane_order = LaneOrder(len(microbatches), encoded, max(kept_batches, 1)) if in_fixed_order else None
    # A lane that waits for bytes would keep the other from its turn, or other tensor ranks from their encoder batch.
    holds_all = some_in_fixed_order or shard.meeting(ENCODER).ranks > 1
    modalities = tuple(sorted({entry.modality for entry in plan.entries}))
    return StepProgram(batches, order, microbatches, last_microbatch, rows, modalities, lane_order, holds_all)


def _encoder_work(
    plan: StepPlan, shard: RankShard, own: Mapping[int, Sequence[int]], kept_batches: int
) -> tuple[dict[int, EncoderBatchWork], tuple[Pass, ...], tuple[int, ...]]:
    """What an encoder lane does.

    Args:
        plan: who encodes and who reads what.
        shard: which rank it is.
        own: number of each of its encoder batches -> its entries.
        kept_batches: encoder batches whose activations may be kept at a time.

    Returns:
        the encoder batches, the order of those of an encoder that trains, and the position at which each is read.
    """
    rank = shard.encoder_rank
    assert rank is not None
    (order,) = member_orders(
        plan,
        [rank],
        kept_batches,
        meet=bool(shard.meeting(ENCODER).passes),
        colocated=[rank] if shard.backbone_rank is not None else [],
        in_fixed_order=shard.in_fixed_order,
    )
    number_of = {turn: number for number, turn in enumerate(plan.encoder_turns[rank])}
    batches: dict[int, EncoderBatchWork] = {}
    for place in dict.fromkeys(place for _, place in order.passes):
        number = number_of.get(order.turns[place], PADDING)
        batches[place] = _encoder_batch(plan, number, own.get(number, ()), place in order.recomputed)
    return batches, order.passes, tuple(position for position, _ in order.turns)


def _encoder_batch(plan: StepPlan, number: int, numbers: Sequence[int], recomputes: bool) -> EncoderBatchWork:
    entries = [plan.entries[entry] for entry in numbers]
    return EncoderBatchWork(
        number,
        tuple(numbers),
        [entry.rows for entry in entries],
        tuple(entry.backbone_rank for entry in entries),
        recomputes,
    )


def _microbatch(plan: StepPlan, number: int, numbers: Sequence[int]) -> MicrobatchWork:
    entries = {entry: plan.entries[entry] for entry in numbers}
    rows: dict[str, int] = {}
    slices: dict[int, tuple[slice, ...]] = {}
    for modality in sorted({entry.modality for entry in entries.values()}):  # as one process has them, by name
        own = {entry: found for entry, found in entries.items() if found.modality == modality}
        rows[modality], found_slices = feature_slices(plan, list(own.values()))
        slices |= zip(own, found_slices, strict=True)
    return MicrobatchWork(
        number,
        rows,
        {entry: slices[entry] for entry in entries},
        {entry: found.encoder_rank for entry, found in entries.items()},
        {entry: found.modality for entry, found in entries.items()},
    )


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
