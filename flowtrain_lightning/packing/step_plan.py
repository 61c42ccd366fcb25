"""The input and output of a packer: the sizes of samples, and the plan of one step (numpy only)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.packing.role_graph import RoleGraph
from flowtrain_lightning.packing.step_graph import BatchOf
from flowtrain_lightning.packing.step_members import TWO_ROLES

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
NameArray = NDArray[np.str_]

IMAGE = "image"
AUDIO = "audio"
"""The modality of images, and of videos, which the same encoder takes."""

Batches = tuple[tuple[IntArray, ...], ...]
"""``[member][number]`` -> what each batch of a role holds: numbers of media items, or of samples for the trunk."""

Turn = tuple[int, int]
"""When an encoder batch is due: the position of the microbatches that read it, and how many batches of its member for
that position come before it."""

SyncEvery = Literal["microbatch", "step"]
"""How often backbone ranks wait for each other: at every microbatch (FSDP, tensor and pipeline parallelism), or once a
step (replicas)."""

SYNC_EVERY: tuple[str, ...] = get_args(SyncEvery)


class PackingError(ValueError):
    """A request that cannot be packed."""


@dataclass(frozen=True)
class SampleSizes:
    """Sizes of some samples, as one array per quantity.

    Attributes:
        tokens: ``[samples]`` tokens of each sequence, media tokens included.
        targets: ``[samples]`` tokens that carry loss.
        media_start: ``[samples + 1]`` the media items of sample ``i`` are ``media_start[i]:media_start[i + 1]``.
        media_rows: ``[media items]`` rows of features, that is backbone tokens, of each media item.
        media_patches: ``[media items]`` encoder patches of each media item.
        media_modality: ``[media items]`` the modality of each, for example ``"audio"``; None where all are images.
        media_content: ``[media items]`` equal numbers for equal content, which is encoded once a step; -1 where it is
            not known. None where it is of none.
        media_parts: ``[media items]`` moments of a clip, tiles of a picture, 1 of what is in one part; None where
            nothing is known of parts.
        media_pieces: ``[media items, 3]`` of media items that are pieces, see `in_pieces`: number of the whole one in
            its sample, its first part, and the part behind its last. None where media items are whole.
    """

    tokens: IntArray
    targets: IntArray
    media_start: IntArray
    media_rows: IntArray
    media_patches: IntArray
    media_modality: NameArray | None = None
    media_content: IntArray | None = None
    media_parts: IntArray | None = None
    media_pieces: IntArray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def media_items(self) -> int:
        """How many media items there are, one in several pieces once."""
        if self.media_pieces is None:
            return len(self.media_rows)
        return int(np.count_nonzero(self.media_pieces[:, 1] == 0))

    @property
    def media_sample(self) -> IntArray:
        """``[media items]`` the sample that owns each media item."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.media_start))

    @property
    def alike(self) -> IntArray | None:
        """``[media items]`` equal numbers for those of which one may be encoded for all; None: no two are alike."""
        if self.media_content is None or not len(self.media_content):
            return None
        unlike = -1 - np.arange(len(self.media_content), dtype=np.int64)
        content = np.where(self.media_content < 0, unlike, self.media_content)
        # Of other sizes it is another one, whoever says what is equal: two large factors keep them apart.
        told = content + self.media_rows * 0x1E3779B97F4A7C15 + self.media_patches * 0x3F58476D1CE4E5B9
        numbers: IntArray = np.unique(told, return_inverse=True)[1].reshape(-1).astype(np.int64)
        return numbers if numbers.max() + 1 < len(numbers) else None

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities of these media items, by name; images where nothing is said of any."""
        return (IMAGE,) if self.media_modality is None else tuple(np.unique(self.media_modality).tolist())

    def modality_of(self, media: int) -> str:
        """The modality of one media item."""
        return IMAGE if self.media_modality is None else str(self.media_modality[media])

    def of_modality(self, modality: str) -> IntArray:
        """``[media items of it]`` the numbers of all media items of one modality, ascending."""
        if self.media_modality is None:
            return np.arange(len(self.media_rows) if modality == IMAGE else 0, dtype=np.int64)
        return np.flatnonzero(self.media_modality == modality).astype(np.int64)

    def select(self, samples: IntArray) -> SampleSizes:
        """The sizes of ``samples``, ``[n]`` indices, in that order (an index may occur twice)."""
        counts = np.diff(self.media_start)[samples]
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        media = np.repeat(self.media_start[samples] - start[:-1], counts) + np.arange(start[-1], dtype=np.int64)
        return SampleSizes(
            tokens=self.tokens[samples],
            targets=self.targets[samples],
            media_start=start,
            media_rows=self.media_rows[media],
            media_patches=self.media_patches[media],
            media_modality=None if self.media_modality is None else self.media_modality[media],
            media_content=None if self.media_content is None else self.media_content[media],
            media_parts=None if self.media_parts is None else self.media_parts[media],
            media_pieces=None if self.media_pieces is None else self.media_pieces[media],
        )


@dataclass(frozen=True)
class Entry:
    """The rows that one batch hands to another one, or to several: the unit that passes through the pool.

    Attributes:
        maker: the batch that makes them.
        readers: the batches that read them, by their position, then by member.
        media: ``[n]`` the step's media item numbers, adjacent in the batch that makes them.
        rows: rows of features in all.
        modality: of the media items.
    """

    maker: BatchOf
    readers: tuple[BatchOf, ...]
    media: IntArray
    rows: int
    modality: str

    @property
    def members(self) -> tuple[tuple[str, int], ...]:
        """Role and number of the members that read it: each gives gradients back once."""
        return tuple(dict.fromkeys((reader.role, reader.member) for reader in self.readers))


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step: who encodes and who reads what. Equal on all ranks.

    Attributes:
        samples: ``[n]`` indices into the data set, in sampler order.
        sizes: the sizes of these samples; media items are numbered in this order.
        batches: role -> its batches. Those of the trunk are its microbatches: indices into ``samples``, as many for
            every member, some of them perhaps empty. Those of a role that encodes are media item numbers of one
            modality, grouped by the microbatch that reads them. The microbatches that read a batch first are of one
            position, and for one member these never fall from one batch to the next: this is why the order of the step
            cannot block in the pool. Batches are empty only where every rank encodes what it reads. Those of a role
            behind the trunk are the same of the media items that it generates, from rows of these microbatches.
        graph: the roles, and what flows between them.
        encoded_as: ``[media items]`` the media item that is encoded in the place of each, since it is the same one;
            None where each is encoded.
        costs: role -> ``[member][number]`` what each batch costs, in one unit, where their order is searched.
    """

    samples: IntArray
    sizes: SampleSizes
    batches: Mapping[str, Batches]
    graph: RoleGraph = TWO_ROLES
    encoded_as: IntArray | None = None
    costs: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)

    @property
    def microbatches(self) -> Batches:
        """``[member][position]`` -> indices into ``samples``: the batches of the trunk."""
        return self.batches[self.graph.trunk]

    def lengths(self, role: str) -> IntArray:
        """The length of each item that a role's batches hold: tokens of samples, patches of media items."""
        return self.sizes.tokens if role == self.graph.trunk else self.sizes.media_patches

    def length(self, batch: BatchOf) -> int:
        """The tokens, or patches, of a batch."""
        return int(self.lengths(batch.role)[self.batches[batch.role][batch.member][batch.number]].sum())

    @cached_property
    def encoded(self) -> IntArray:
        """The numbers of the media items that are encoded, ascending."""
        everyone = np.arange(len(self.sizes.media_rows), dtype=np.int64)
        once = np.ones(len(everyone), dtype=bool) if self.encoded_as is None else self.encoded_as == everyone
        if self.sizes.media_modality is not None and self.graph.generated:
            once &= ~np.isin(self.sizes.media_modality, [*self.graph.generated])
        return np.flatnonzero(once)

    @cached_property
    def makers(self) -> tuple[tuple[str, int], ...]:
        """Role and number of every member that encodes, one role after another."""
        return tuple((role, member) for role in self.graph.producers for member in range(len(self.batches[role])))

    @cached_property
    def readers(self) -> tuple[IntArray, IntArray]:
        """The member of the trunk, and the position of its microbatch, that reads each media item, or has to say it.

        Two arrays of ``[media items]``.
        """
        member_of = np.empty(len(self.samples), dtype=np.int64)
        position_of = np.empty(len(self.samples), dtype=np.int64)
        for member, microbatches in enumerate(self.microbatches):
            for position, samples in enumerate(microbatches):
                member_of[samples] = member
                position_of[samples] = position
        owner = self.sizes.media_sample
        return member_of[owner], position_of[owner]

    @cached_property
    def media_readers(self) -> list[tuple[BatchOf, ...]]:
        """``[media items]`` all microbatches that read what is encoded, by position, then by member.

        Nobody reads what is not encoded.
        """
        trunk = self.graph.trunk
        own = [BatchOf(trunk, *reader) for reader in zip(*(each.tolist() for each in self.readers), strict=True)]
        if self.encoded_as is None:
            return [(reader,) for reader in own]
        found: list[set[BatchOf]] = [set() for _ in own]
        for reader, encoded in zip(own, self.encoded_as.tolist(), strict=True):
            found[encoded].add(reader)
        return [tuple(sorted(each, key=lambda reader: (reader.number, reader.member))) for each in found]

    @cached_property
    def read_until(self) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        """Role that encodes -> ``[member][number]`` the position of the last microbatches that read a batch; or -1."""
        readers = self.media_readers

        def until(media: IntArray) -> int:
            return max((readers[item][-1].number for item in media.tolist()), default=-1)

        return {role: tuple(tuple(map(until, own)) for own in self.batches[role]) for role in self.graph.producers}

    @cached_property
    def turns(self) -> Mapping[str, tuple[tuple[Turn, ...], ...]]:
        """Role but the trunk -> ``[member][number]`` the turn of each batch, rising; (-1, ...) of an empty one."""
        position_of = self.readers[1]

        def in_order(batches: Iterable[IntArray]) -> tuple[Turn, ...]:
            positions = [int(position_of[media[0]]) if len(media) else -1 for media in batches]
            return tuple((position, n - positions.index(position)) for n, position in enumerate(positions))

        others = (*self.graph.producers, *self.graph.behind)
        return {role: tuple(map(in_order, self.batches[role])) for role in others if role in self.batches}

    def turns_of(self, role: str, members: Iterable[int] | None = None) -> tuple[Turn, ...]:
        """The turns of some members of a role together, rising: those of a shard group, or of all members."""
        own = self.turns[role]
        return tuple(sorted({turn for member in _all_or(members, own) for turn in own[member]}))

    def turns_until(self, role: str, turns: Iterable[Turn], members: Iterable[int] | None = None) -> tuple[int, ...]:
        """The position of the last microbatches that read what any of some members encode at each turn."""
        last: dict[Turn, int] = {}
        for member in _all_or(members, self.turns[role]):
            for turn, until in zip(self.turns[role][member], self.read_until[role][member], strict=True):
                last[turn] = max(last.get(turn, -1), until)
        return tuple(last[turn] for turn in turns)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All entries of the step in a fixed order; the index of an entry is its number."""
        readers_of, media_rows = self.media_readers, self.sizes.media_rows
        found: list[Entry] = []
        for role, member in self.makers:
            for number, media in enumerate(self.batches[role][member]):
                start, readers = 0, [readers_of[item] for item in media.tolist()]
                for end, reader in enumerate(readers, 1):
                    if end == len(readers) or readers[end] != reader:
                        own = media[start:end]
                        rows, modality = int(media_rows[own].sum()), self.sizes.modality_of(own[0])
                        found.append(Entry(BatchOf(role, member, number), reader, own, rows, modality))
                        start = end
        return (*found, *(entry for role in self.graph.behind for entry in self._read_behind(role)))

    def media_of(self, batch: BatchOf, modality: str) -> IntArray:
        """The media items of a modality whose rows a batch reads, or which it says itself, in order."""
        own = self.batches[batch.role][batch.member][batch.number]
        if batch.role != self.graph.trunk:
            return own
        start = self.sizes.media_start
        media = np.concatenate([np.empty(0, np.int64), *(np.arange(start[s], start[s + 1]) for s in own)])
        return media[np.isin(media, self.sizes.of_modality(modality))]

    def _read_behind(self, role: str) -> Iterator[Entry]:
        """Rows of microbatches from which a role generates: together those of neighbours that go to one batch."""
        trunk, modality = self.graph.trunk, str(self.graph.modality_of(role))
        reader_of = {
            item: BatchOf(role, member, number)
            for member, batches in enumerate(self.batches[role])
            for number, media in enumerate(batches)
            for item in media.tolist()
        }
        for maker in (BatchOf(trunk, m, p) for m, own in enumerate(self.microbatches) for p in range(len(own))):
            for reader, items in groupby(self.media_of(maker, modality).tolist(), key=reader_of.__getitem__):
                media = np.array(list(items), dtype=np.int64)
                yield Entry(maker, (reader,), media, int(self.sizes.media_rows[media].sum()), modality)


def _all_or(members: Iterable[int] | None, of_role: Sized) -> Iterable[int]:
    return range(len(of_role)) if members is None else members
