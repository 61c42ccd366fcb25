"""What one rank does in a step and in which order: worked out from the plan, while the step before runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from flowtrain_lightning.compute.features import FeatureSpec
from flowtrain_lightning.data import Entry, RankShard, StepPlan
from flowtrain_lightning.packing.simulator import recomputed_batches
from flowtrain_lightning.pool import Reservation, assign_offsets

Work = tuple[Literal["forward", "backward"], int]
"""One unit of an encoder lane's work: what is done with the encoder batch of this number."""


@dataclass(frozen=True)
class EncoderBatchWork:
    """One encoder batch of this rank: what of it goes where.

    Attributes:
        number: its position in this rank's order.
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
        rows: rows of features in all, in the order in which the media items appear in the microbatch.
        slices: number of an entry -> the runs of adjacent rows that its own rows become, one after another.
        owners: number of an entry -> who encodes it, counted within the encoder role.
    """

    number: int
    rows: int
    slices: dict[int, tuple[slice, ...]]
    owners: dict[int, int]


@dataclass(frozen=True)
class StepProgram:
    """The work of one rank in one step. A pure function of plan and settings, so it can be made ahead of the step.

    Attributes:
        encoder_batches: those of this rank that hold media items, by number; empty without an encoder lane.
        encoder_order: the order of an encoder that trains. One that does not runs forwards only.
        microbatches: those of this rank; empty without a backbone lane.
        entry_rows: for each encoder rank the rows of the entries of each of its batches, for what the pool must hold.
    """

    encoder_batches: dict[int, EncoderBatchWork]
    encoder_order: tuple[Work, ...]
    microbatches: tuple[MicrobatchWork, ...]
    entry_rows: tuple[tuple[tuple[int, ...], ...], ...]
    _sizes: dict[FeatureSpec, PoolDemand] = field(default_factory=dict)

    def pool_demand(self, spec: FeatureSpec) -> PoolDemand:
        """What the step asks of the pool where a row of features is ``spec``; worked out once."""
        if spec not in self._sizes:
            self._sizes[spec] = PoolDemand(self, spec)
        return self._sizes[spec]


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
        self.least = max((assign_offsets(_held_by_batch(of_rank)).capacity for of_rank in sized), default=0)
        self.ample = max((sum(map(sum, of_rank)) for of_rank in sized), default=0)
        batches = program.encoder_batches.values()
        own = _held_by_batch([spec.entry_nbytes(batch.rows) for batch in batches])
        numbers = [entry for batch in batches for entry in batch.entries]
        self.features: dict[int, Reservation] = dict(zip(numbers, own, strict=True))
        self.gradients: dict[int, Reservation] = {}
        for microbatch in program.microbatches:
            rows = [sum(part.stop - part.start for part in parts) for parts in microbatch.slices.values()]
            for entry, nbytes in zip(microbatch.slices, spec.entry_nbytes(rows), strict=True):
                # An encoder lane copies gradients whenever it has its turn: none is held until another one was put.
                self.gradients[entry] = Reservation(nbytes, released_after=len(self.gradients))


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
    batches: dict[int, EncoderBatchWork] = {}
    order: tuple[Work, ...] = ()
    if shard.encoder_rank is not None:
        recomputed = recomputed_batches(plan, kept_batches)[shard.encoder_rank]
        for number, numbers in of_batch[shard.encoder_rank].items():
            batches[number] = _encoder_batch(plan, number, numbers, number in recomputed)
        order = tuple(encoder_order(list(batches), kept_batches, recomputed))
    microbatches: tuple[MicrobatchWork, ...] = ()
    if shard.backbone_rank is not None:
        count = len(plan.microbatches[shard.backbone_rank])
        microbatches = tuple(_microbatch(plan, number, of_microbatch.get(number, [])) for number in range(count))
    rows = tuple(
        tuple(tuple(plan.entries[entry].rows for entry in numbers) for numbers in of_rank.values())
        for of_rank in of_batch
    )
    return StepProgram(batches, order, microbatches, rows)


def encoder_order(batches: Sequence[int], kept: int, recomputed: Collection[int]) -> Iterable[Work]:
    """The order in which a trainable encoder works: forward while activations may be kept, else the oldest backward.

    Args:
        batches: numbers of the encoder batches, in order.
        kept: batches whose activations may be kept at a time.
        recomputed: batches of which nothing is kept; with those that `recomputed_batches` names, nothing can block.
    """
    forwards, backwards = deque(batches), deque[int]()
    held = 0
    while forwards or backwards:
        if forwards and (forwards[0] in recomputed or held < kept):
            number = forwards.popleft()
            backwards.append(number)
            held += number not in recomputed
            yield "forward", number
        else:
            number = backwards.popleft()
            held -= number not in recomputed
            yield "backward", number


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
    if not numbers:
        return MicrobatchWork(number, 0, {}, {})
    entries = {entry: plan.entries[entry] for entry in numbers}
    rows, slices = feature_slices(plan, list(entries.values()))
    return MicrobatchWork(
        number,
        rows,
        dict(zip(entries, slices, strict=True)),
        {entry: found.encoder_rank for entry, found in entries.items()},
    )


def feature_slices(plan: StepPlan, entries: Sequence[Entry]) -> tuple[int, list[tuple[slice, ...]]]:
    """Where the features of one microbatch's entries belong.

    Args:
        plan: the step's plan.
        entries: all entries of one microbatch.

    Returns:
        rows of features of the microbatch, which has its media items in order of appearance; and for each entry the
        runs of adjacent rows that its own rows become, one after another.
    """
    members = plan.microbatches[entries[0].backbone_rank][entries[0].microbatch]
    sizes = plan.sizes
    media = np.concatenate([np.arange(sizes.media_start[s], sizes.media_start[s + 1]) for s in members])
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
