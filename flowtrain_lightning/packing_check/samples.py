"""Real samples that differ in size, loaded once, to be packed together in any order or one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowtrain_lightning.data import FlowDataModule, PackedBatch, PackedMedia
from flowtrain_lightning.data.batch import GeneratedItem
from flowtrain_lightning.data.loading.collate import pack_media, pack_sequences
from flowtrain_lightning.data.loading.sample_loader import SampleLoader
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from flowtrain_lightning.data.records.conversation import TokenSequence
from flowtrain_lightning.data.sources.stream_of_samples import SampleStream, StreamPosition
from flowtrain_lightning.packing import IntArray, NameArray, SampleSizes
from flowtrain_lightning.packing.role_graph import GENERATED

_CANDIDATES = 2048
"""Samples of the data among which some are chosen."""
_READ_OF_A_STREAM = 64
_SAMPLES = 4
"""So many are packed at least: each but the first and the last then has a neighbour on both sides."""
_MOST_TOKENS = 2048
_WORK = 5e8
"""Tokens and patches of the largest sample, times the weights of the module: about a second of one core."""


Item = tuple[int, int]
"""A media item: its sample's place among the checked ones, and its number in it."""


@dataclass(frozen=True)
class LoadedSample:
    """One sample, with its media decoded.

    Attributes:
        number: its number in the data.
        sequence: tokens and labels.
        media: its media items, in order.
        modalities: ``[media items]`` the modality of each.
    """

    number: int
    sequence: TokenSequence
    media: tuple[LoadedMedia, ...]
    modalities: NameArray


@dataclass(frozen=True)
class CheckedSamples:
    """The samples of one check.

    Attributes:
        samples: at least two.
    """

    samples: tuple[LoadedSample, ...]

    @property
    def media(self) -> list[Item]:
        """Owner and number in the owner of every media item, sample by sample."""
        return [(owner, number) for owner, sample in enumerate(self.samples) for number in range(len(sample.media))]

    @property
    def modalities(self) -> list[str]:
        """The modalities that occur of media that are encoded."""
        return sorted({str(name) for sample in self.samples for name in sample.modalities} - {GENERATED})

    def of_modality(self, modality: str) -> list[Item]:
        """The media items of one modality, sample by sample."""
        return [(owner, number) for owner, number in self.media if self.samples[owner].modalities[number] == modality]

    def loaded(self, item: Item) -> LoadedMedia:
        """One media item."""
        owner, number = item
        return self.samples[owner].media[number]

    def microbatch(self, members: Sequence[int], padding: int = 0) -> PackedBatch:
        """Some of the samples as one microbatch, in this order, with so many tokens of padding behind them."""
        chosen = [self.samples[member] for member in members]
        return pack_sequences(
            [sample.sequence for sample in chosen],
            [sample.number for sample in chosen],
            pad_to=sum(len(sample.sequence) for sample in chosen) + padding,
            modalities=[sample.modalities for sample in chosen],
        )

    def encoder_batch(self, items: Sequence[Item], changed: Item | None = None) -> PackedMedia:
        """Some of the media items, all of one modality, as one encoder batch, in this order.

        Args:
            items: which.
            changed: one of them that is shown as its own negative.
        """
        loaded = {item: self.loaded(item) for item in items}
        if changed is not None:
            loaded[changed] = loaded[changed]._replace(pixels=-loaded[changed].pixels)
        return pack_media([loaded[item] for item in items])

    def targets(self, members: Sequence[int]) -> PackedMedia:
        """Media items that are to be generated of some of the samples, in this order."""
        every = self.of_modality(GENERATED)
        items = [item for member in members for item in every if item[0] == member]
        rows = [int(self.samples[owner].sequence.media_rows[number]) for owner, number in items]
        told = tuple(GeneratedItem(*item, count) for item, count in zip(items, rows, strict=True))
        return replace(pack_media([self.loaded(item) for item in items]), items=told)


def load_samples(data: FlowDataModule, weights: int) -> CheckedSamples:
    """A few small samples: with one media item, without any, with several of unlike sizes, of every modality.

    And a large one, beyond windows and capacities that small ones stay below, where the module is small enough.

    Args:
        data: has training data; belongs to no Trainer.
        weights: of the module.

    Raises:
        DataError: the training data cannot be read.
    """
    loader = data.train_dataloader().steps.samples
    pool, sizes = _candidates(loader, data.seed)
    largest = int(min(_MOST_TOKENS, _WORK / max(weights, 1)))
    return CheckedSamples(tuple(_loaded(loader, pool[number], sizes, number) for number in choose(sizes, largest)))


def choose(sizes: SampleSizes, largest: int = 0) -> list[int]:
    """Chooses samples to be packed together: small ones that differ in tokens and in patches, one of each kind.

    Args:
        sizes: of the candidates, at least one.
        largest: tokens and patches that the largest one may have.

    Returns:
        their numbers; one of them several times where there are too few.
    """
    learning = np.flatnonzero(sizes.targets > 0)
    numbers = learning if len(learning) else np.arange(len(sizes))
    ordered = numbers[np.argsort(sizes.tokens[numbers], kind="stable")].tolist()
    chosen: list[int] = []

    def take(candidates: Iterator[int]) -> None:
        fresh = (number for number in candidates if number not in chosen)
        if (found := next(fresh, None)) is not None:
            chosen.append(found)

    def patches(number: int) -> list[int]:
        found: list[int] = sizes.media_patches[sizes.media_start[number] : sizes.media_start[number + 1]].tolist()
        return found

    take(number for number in ordered if len(patches(number)) == 1)
    take(number for number in ordered if not patches(number))
    take(number for number in ordered if len(set(patches(number))) > 1)
    take(number for number in ordered if len(patches(number)) > 1)
    known = {count for number in chosen for count in patches(number)}
    take(number for number in ordered if patches(number) and not known.issuperset(patches(number)))
    for modality in sizes.modalities if sizes.media_modality is not None else ():
        owners = set(sizes.media_sample[sizes.of_modality(modality)].tolist())
        if not owners.intersection(chosen):
            take(number for number in ordered if number in owners)
    if sizes.media_parts is not None:
        in_parts = set(sizes.media_sample[sizes.media_parts > 1].tolist())
        if not in_parts.intersection(chosen):
            take(number for number in ordered if number in in_parts)
    while len(chosen) < min(_SAMPLES, len(ordered)):
        lengths = {int(sizes.tokens[number]) for number in chosen}
        unlike = [number for number in ordered if int(sizes.tokens[number]) not in lengths]
        take(iter([*unlike, *ordered]))
    work = {number: int(sizes.tokens[number]) + sum(patches(number)) for number in ordered}
    take(
        iter([max((number for number in ordered if work[number] <= largest), key=work.__getitem__, default=chosen[0])])
    )
    return chosen * (1 if len(chosen) > 1 else 2)


def _candidates(loader: SampleLoader, seed: int) -> tuple[list[int], SampleSizes]:
    source = loader.source
    if isinstance(source, SampleStream):
        source.begin(0, StreamPosition())
        pool = np.arange(len(source.lengths(0, _READ_OF_A_STREAM)), dtype=np.int64)
    else:
        pool = np.sort(np.random.default_rng(seed).permutation(len(source))[:_CANDIDATES])
    return pool.tolist(), source.sizes(pool)


def _loaded(loader: SampleLoader, sample: int, sizes: SampleSizes, number: int) -> LoadedSample:
    own: IntArray = np.arange(sizes.media_start[number], sizes.media_start[number + 1])
    record, rows = loader.source.record(sample), sizes.media_rows[own]
    media = [loader.media(record, sample, place, count, 0) for place, count in enumerate(rows.tolist())]
    return LoadedSample(
        sample,
        loader.sequence(record, int(sizes.tokens[number]), rows),
        tuple(_with_floats(item) for item in media),
        np.asarray([item.modality for item in media], dtype=np.str_),
    )


def _with_floats(item: LoadedMedia) -> LoadedMedia:
    return item._replace(pixels=item.patches, normalisation=None)
