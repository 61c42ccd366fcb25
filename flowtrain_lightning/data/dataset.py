"""One rank's shard of any step: planned from sizes, then read from the files as far as the shard needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from flowtrain_lightning.data.batch import PackedBatch, PackedMedia, RankShard, StepBatch
from flowtrain_lightning.data.collate import no_media, pack_media, pack_sequences, padding_microbatch
from flowtrain_lightning.data.conversation import Template, TokenSequence
from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.feature_store import FeatureStore
from flowtrain_lightning.data.formats import Record
from flowtrain_lightning.data.image_processor import ImageProcessor
from flowtrain_lightning.data.kept_rows import KeptRows
from flowtrain_lightning.data.loaded_media import LoadedMedia, OwnMedia
from flowtrain_lightning.data.measuring import unusable
from flowtrain_lightning.data.media_content import content_name
from flowtrain_lightning.data.media_files import MediaError, VideoFile
from flowtrain_lightning.data.media_status import refuse_rewritten
from flowtrain_lightning.data.sample_tokens import token_sequence
from flowtrain_lightning.data.sampler import Sampling
from flowtrain_lightning.data.sources.sample_source import SampleSource
from flowtrain_lightning.data.step_packing import StepPacking
from flowtrain_lightning.data.stream_steps import StreamEnded, StreamSteps
from flowtrain_lightning.data.token_stream import TokenStream, saved_stream, stream_state
from flowtrain_lightning.data.tokenization import Tokenizer
from flowtrain_lightning.data.video_processor import VideoProcessor
from flowtrain_lightning.data.workers import SharedMemoryBatch
from flowtrain_lightning.packing import IntArray, SampleSizes, StepPlan
from flowtrain_lightning.packing.sample_stream import StreamStep
from flowtrain_lightning.packing.step_members import StepMembers

if TYPE_CHECKING:
    from PIL.Image import Image

Augment = Callable[["Image", np.random.Generator], "Image"]
"""Changes an image by chance, taking all chance from the generator that it is given."""


@dataclass(frozen=True)
class SampleLoader:
    """Loads what a sample consists of.

    Attributes:
        source: the samples.
        tokenizer: makes ids of text.
        template: how a conversation is written.
        images: makes patches of images.
        prompt: sequences end with the header of the last assistant turn.
        limit: cut sequences to so many tokens.
        augment: changes images. Its chance depends on seed, epoch, sample and the image's number in it alone.
        seed: of augmentation.
        videos: makes patches of videos; None: there are none.
    """

    source: SampleSource
    tokenizer: Tokenizer
    template: Template
    images: ImageProcessor
    prompt: bool = False
    limit: int | None = None
    augment: Augment | None = None
    seed: int = 0
    videos: VideoProcessor | None = None

    def sequence(self, record: Record, tokens: int, rows: IntArray) -> TokenSequence:
        """A sample's tokens and labels.

        Args:
            record: the sample's record.
            tokens: how many tokens the plan counts on.
            rows: ``[media items]`` rows of features of its media items.

        Raises:
            DataError: it has another number of tokens.
        """
        sequence = token_sequence(record, self.template, self.tokenizer, rows, prompt=self.prompt, videos=self.videos)
        if self.limit is not None:
            sequence = sequence.cut(self.limit)
        if len(sequence) != tokens:
            raise DataError(
                f"{record.where}: it has {len(sequence)} tokens, but had {tokens} when the file was indexed; "
                "the file was changed meanwhile. Start again to index it anew."
            )
        return sequence

    def media(self, record: Record, sample: int, number: int, rows: int, epoch: int) -> LoadedMedia:
        """One media item's patches.

        Args:
            record: the sample's record.
            sample: its number in the source.
            number: the media item's number in the record.
            rows: how many rows of features the plan counts on.
            epoch: the epoch, for augmentation.

        Raises:
            DataError: the media item cannot be decoded, or is another one than was measured.
        """
        item = record.media[number]
        try:
            if isinstance(item, VideoFile):
                assert self.videos is not None, "who measures videos knows what becomes of them"
                loaded = self.videos.load(item)
            elif isinstance(item, OwnMedia):
                loaded = item.load()
            else:
                augment = self._augmentation(sample, number, epoch)
                loaded = self.images.load_pixels(item, augment, alone=len(record.media) == 1)
        except MediaError as error:
            refuse_rewritten(item, number, record)
            raise unusable(item, record, error) from error
        refuse_rewritten(item, number, record)
        if loaded.rows != rows:
            kind = loaded.modality if loaded.clip is None else "video"
            raise DataError(
                f"{record.where}: {kind} {item} gives {loaded.rows} rows of features, but gave {rows} when it was "
                "indexed; it was changed meanwhile. Delete the index in the cache folder and start again."
            )
        return loaded

    def content(self, record: Record, number: int) -> str:
        """A name of one media item's content, by which its features are kept.

        Args:
            record: the sample's record.
            number: the media item's number in the record.

        Raises:
            DataError: the media item cannot be read, or is another one than was measured.
        """
        item = record.media[number]
        refuse_rewritten(item, number, record)
        try:
            return content_name(item, alone=len(record.media) == 1)
        except MediaError as error:
            raise unusable(item, record, error) from error

    def _augmentation(self, sample: int, number: int, epoch: int) -> Callable[[Image], Image] | None:
        if self.augment is None:
            return None
        return partial(_augmented, self.augment, np.random.default_rng([self.seed, epoch, sample, number]))


@dataclass(frozen=True)
class StepDataset(Dataset[SharedMemoryBatch | None]):
    """Steps by epoch, number and the packing that holds in it. Reading one depends on these alone.

    Attributes:
        samples: loads samples.
        sampling: which samples are in a step.
        shard: what this rank holds of every step.
        packing: how samples are packed, where the loader says nothing else.
        pad_to_budget: fill every microbatch up to the token budget.
        unset_settings: names of settings that the user did not give: a checkpoint's take their place.
        stores: role -> where its features are kept; without the roles whose features are not.
        shares: a media item that several samples of a step have is encoded once.
    """

    samples: SampleLoader
    sampling: Sampling | TokenStream | StreamSteps
    shard: RankShard
    packing: StepPacking
    pad_to_budget: bool = False
    unset_settings: frozenset[str] = frozenset()
    stores: Mapping[str, FeatureStore] = field(default_factory=dict)
    shares: bool = True

    def __len__(self) -> int:
        if self.sampling.steps is None:
            raise TypeError("How many steps an epoch of a stream has is not known.")
        return self.sampling.steps

    def __getitem__(self, step: tuple[int, int, StepPacking]) -> SharedMemoryBatch | None:
        try:
            batch = self.load(*step)
        except StreamEnded:
            return None
        return SharedMemoryBatch.of(batch, self._stream_state())

    def plan(self, epoch: int, step: int, packing: StepPacking | None = None) -> StepPlan:
        """The whole step's plan, equal on all ranks; without ``packing``, as the run began."""
        packing, microbatches = packing or self.packing, None
        sampling = self.sampling
        found = sampling.step(epoch, step)
        if isinstance(found, StreamStep):
            assert not isinstance(sampling, Sampling)
            assert sampling.settings is not None
            chosen = sampling.samples(found.samples) if isinstance(sampling, TokenStream) else found.samples
            microbatches = packing.arrange(found, sampling.settings, self.shard.members)
        else:
            chosen = found
        sizes = self.samples.source.sizes(chosen)
        if self.samples.augment is not None or not self.shares:  # chance makes two pictures of one
            sizes = replace(sizes, media_content=None)
        return packing.plan(sizes, chosen, self.shard.members, microbatches)

    def resumed_from(self, state: Mapping[str, Any]) -> StepDataset:
        """The steps as they were when ``state`` was saved, as far as the user has not set otherwise."""
        packing, sampling = self.packing.resumed_from(state["packing"], self.unset_settings), self.sampling
        if isinstance(sampling, TokenStream) and state["stream"] is not None:
            sampling = sampling.resumed_from(state["settings"], stream_state(state["stream"]), self.unset_settings)
        elif isinstance(sampling, StreamSteps) and state["stream"] is not None:
            sampling = sampling.resumed_from(state["settings"], state["stream"], self.unset_settings)
        return replace(self, packing=packing, sampling=sampling)

    def load(self, epoch: int, step: int, packing: StepPacking | None = None) -> StepBatch:
        """This rank's shard of one step.

        Raises:
            DataError: a record or media item cannot be used.
        """
        plan, shard = self.plan(epoch, step, packing), self.shard
        record_of = cache(self.samples.source.record)  # each is read once, for its tokens and for its images
        for sample in self._needed(plan):  # in their order, since some stores are read forward
            record_of(sample)
        microbatches: tuple[PackedBatch | None, ...] = ()
        media: dict[str, tuple[PackedMedia | None, ...]] = {}
        padding_media: dict[str, PackedMedia] = {}
        for role, member in shard.own.items():
            batches = plan.batches[role][member]
            if role == shard.members.trunk:
                microbatches = tuple(self._microbatch(plan, samples, record_of) for samples in batches)
                continue
            media[role] = tuple(self._encoder_batch(plan, items, epoch, record_of, role) for items in batches)
            if shard.members.meeting(role).passes and len(items := _encoded_by(role, shard.members, plan.sizes)):
                smallest = items[[plan.sizes.media_patches[items].argmin()]]
                padding = self._encoder_batch(plan, smallest, epoch, record_of, role)
                assert padding is not None
                padding_media[role] = padding.first_moment
        return StepBatch(plan, shard, microbatches, media, epoch, step, padding_media)

    def _needed(self, plan: StepPlan) -> list[int]:
        """The samples of which this rank holds tokens or media, in the order of their source."""
        wanted = np.zeros(len(plan.samples), dtype=bool)
        for role, member in self.shard.own.items():
            for items in plan.batches[role][member]:
                wanted[items if role == self.shard.members.trunk else plan.sizes.media_sample[items]] = True
        needed: list[int] = np.unique(plan.samples[wanted]).tolist()
        return needed

    def _stream_state(self) -> dict[str, Any] | None:
        if isinstance(self.sampling, StreamSteps):
            return self.sampling.state
        return saved_stream(self.sampling.state) if isinstance(self.sampling, TokenStream) else None

    def _microbatch(self, plan: StepPlan, members: IntArray, record_of: Callable[[int], Record]) -> PackedBatch | None:
        if len(members) == 0:
            return padding_microbatch() if self.shard.members.meeting(plan.graph.trunk).passes else None
        sizes = plan.sizes.select(members)
        samples = plan.samples[members].tolist()
        rows = np.split(sizes.media_rows, sizes.media_start[1:-1])
        sequences = [
            self.samples.sequence(record_of(sample), tokens, of_sample)
            for sample, tokens, of_sample in zip(samples, sizes.tokens.tolist(), rows, strict=True)
        ]
        named = sizes.media_modality
        return pack_sequences(
            sequences,
            samples,
            pad_to=self.packing.token_budget if self.pad_to_budget else None,
            modalities=None if named is None else np.split(named, sizes.media_start[1:-1]),
        )

    def _encoder_batch(
        self, plan: StepPlan, items: IntArray, epoch: int, record_of: Callable[[int], Record], role: str
    ) -> PackedMedia | None:
        if len(items) == 0:
            return None
        owners = plan.sizes.media_sample[items]
        numbers = items - plan.sizes.media_start[owners]
        samples = plan.samples[owners]
        rows = plan.sizes.media_rows[items].tolist()
        wanted = list(zip(map(record_of, samples.tolist()), samples.tolist(), numbers.tolist(), rows, strict=True))
        modality, kept = plan.sizes.modality_of(items[0]), None
        if (store := self.stores.get(role)) is not None:
            kept = KeptRows.found(
                store, [self.samples.content(record, number) for record, _, number, _ in wanted], rows
            )
            wanted = [wanted[place] for place in kept.missing]
        loaded = [self.samples.media(*each, epoch) for each in wanted]
        other = next((found.modality for found in loaded if found.modality != modality), None)
        if other is not None:
            raise DataError(
                f"A media item is loaded as {other!r}, but the sizes of its source say {modality!r} "
                "(SampleSizes.media_modality). Say the same in both."
            )
        packed = pack_media(loaded) if loaded else no_media(modality)
        return packed if kept is None else replace(packed, kept=kept)


def _encoded_by(role: str, members: StepMembers, sizes: SampleSizes) -> IntArray:
    """The media items of a step that a role encodes."""
    modality = members.graph.modality_of(role)
    return np.arange(len(sizes.media_patches), dtype=np.int64) if modality is None else sizes.of_modality(modality)


def _augmented(augment: Augment, generator: np.random.Generator, image: Image) -> Image:
    return augment(image, generator)
