"""The input and output of a packer: the sizes of samples, and the plan of one step (numpy only)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
NameArray = NDArray[np.str_]

IMAGE = "image"
"""The modality of images, and of videos, which the same encoder takes."""

Microbatches = tuple[tuple[IntArray, ...], ...]
"""``[backbone rank][position]`` -> sample numbers."""

EncoderBatches = tuple[tuple[IntArray, ...], ...]
"""``[encoder rank][number]`` -> media item numbers."""

Turn = tuple[int, int]
"""When an encoder batch is due: the position of the microbatches that read it, and how many batches of its rank for
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
    """

    tokens: IntArray
    targets: IntArray
    media_start: IntArray
    media_rows: IntArray
    media_patches: IntArray
    media_modality: NameArray | None = None
    media_content: IntArray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

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
        )


@dataclass(frozen=True)
class Entry:
    """The rows that one encoder batch hands to one microbatch, or to several: the unit that passes through the pool.

    Attributes:
        encoder_rank: who encodes, counted over all encoders, one after another.
        encoder_batch: position in that rank's order.
        backbone_rank: who reads it first, counted within the backbone role.
        microbatch: position in that rank's order.
        media: ``[n]`` the step's media item numbers, adjacent in the encoder batch.
        rows: rows of features in all.
        modality: of the media items.
        also: backbone rank and position of the other microbatches that read the same media items, in their order.
    """

    encoder_rank: int
    encoder_batch: int
    backbone_rank: int
    microbatch: int
    media: IntArray
    rows: int
    modality: str = IMAGE
    also: tuple[tuple[int, int], ...] = ()

    @property
    def readers(self) -> tuple[tuple[int, int], ...]:
        """Backbone rank and position of all microbatches that read it, by position."""
        return (self.backbone_rank, self.microbatch), *self.also

    @property
    def members(self) -> tuple[int, ...]:
        """The backbone ranks that read it: each gives gradients back once."""
        return tuple(dict.fromkeys(rank for rank, _ in self.readers))


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step: who encodes and who reads what. Equal on all ranks.

    Attributes:
        samples: ``[n]`` indices into the data set, in sampler order.
        sizes: the sizes of these samples; media items are numbered in this order.
        microbatches: ``[backbone rank][position]`` -> indices into ``samples``. Every rank has as many microbatches;
            some may be empty.
        encoder_batches: ``[encoder rank][number]`` -> media item numbers, of one modality, grouped by the microbatch
            that reads them. The microbatches that read a batch first are of one position, and on one encoder rank these
            never fall from one batch to the next: this is why the order of the step cannot block in the pool. Batches
            are empty only where every rank encodes what it reads.
        encoded_as: ``[media items]`` the media item that is encoded in the place of each, since it is the same one;
            None where each is encoded.
    """

    samples: IntArray
    sizes: SampleSizes
    microbatches: Microbatches
    encoder_batches: EncoderBatches
    encoded_as: IntArray | None = None

    @cached_property
    def readers(self) -> tuple[IntArray, IntArray]:
        """The backbone rank, and the position of its microbatch, that reads each media item: two ``[media items]``."""
        rank_of = np.empty(len(self.samples), dtype=np.int64)
        position_of = np.empty(len(self.samples), dtype=np.int64)
        for rank, microbatches in enumerate(self.microbatches):
            for position, members in enumerate(microbatches):
                rank_of[members] = rank
                position_of[members] = position
        owner = self.sizes.media_sample
        return rank_of[owner], position_of[owner]

    @cached_property
    def media_readers(self) -> list[tuple[tuple[int, int], ...]]:
        """``[media items]`` backbone rank and position of all microbatches that read what is encoded, by position.

        Nobody reads what is not encoded.
        """
        own = list(zip(*(of_media.tolist() for of_media in self.readers), strict=True))
        if self.encoded_as is None:
            return [(reader,) for reader in own]
        found: list[set[tuple[int, int]]] = [set() for _ in own]
        for reader, encoded in zip(own, self.encoded_as.tolist(), strict=True):
            found[encoded].add(reader)
        return [tuple(sorted(of_media, key=lambda reader: (reader[1], reader[0]))) for of_media in found]

    @cached_property
    def read_until(self) -> tuple[tuple[int, ...], ...]:
        """``[encoder rank][number]`` -> the position of the last microbatches that read each encoder batch; or -1."""
        readers = self.media_readers
        return tuple(
            tuple(max((readers[item][-1][1] for item in media.tolist()), default=-1) for media in batches)
            for batches in self.encoder_batches
        )

    @cached_property
    def encoder_turns(self) -> tuple[tuple[Turn, ...], ...]:
        """``[encoder rank][number]`` -> the turn of each encoder batch, rising; (-1, ...) of an empty one."""
        position_of = self.readers[1]
        turns: list[tuple[Turn, ...]] = []
        for batches in self.encoder_batches:
            positions = [int(position_of[media[0]]) if len(media) else -1 for media in batches]
            turns.append(tuple((position, n - positions.index(position)) for n, position in enumerate(positions)))
        return tuple(turns)

    def turns_of(self, members: Iterable[int]) -> tuple[Turn, ...]:
        """The turns of some encoder ranks together, rising: those of each rank of a shard group."""
        return tuple(sorted({turn for member in members for turn in self.encoder_turns[member]}))

    def turns_until(self, turns: Iterable[Turn], members: Iterable[int]) -> tuple[int, ...]:
        """The position of the last microbatches that read what any of some encoder ranks encode at each turn."""
        last: dict[Turn, int] = {}
        for member in members:
            for turn, until in zip(self.encoder_turns[member], self.read_until[member], strict=True):
                last[turn] = max(last.get(turn, -1), until)
        return tuple(last[turn] for turn in turns)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All entries of the step in a fixed order; the index of an entry is its number."""
        readers_of, media_rows = self.media_readers, self.sizes.media_rows
        found: list[Entry] = []
        for encoder_rank, batches in enumerate(self.encoder_batches):
            for number, media in enumerate(batches):
                start, readers = 0, [readers_of[item] for item in media.tolist()]
                for end, reader in enumerate(readers, 1):
                    if end == len(readers) or readers[end] != reader:
                        members = media[start:end]
                        rows, modality = int(media_rows[members].sum()), self.sizes.modality_of(members[0])
                        (rank, position), *also = reader
                        found.append(Entry(encoder_rank, number, rank, position, members, rows, modality, tuple(also)))
                        start = end
        return tuple(found)
