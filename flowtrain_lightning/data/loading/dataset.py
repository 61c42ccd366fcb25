"""One rank's shard of any step: planned from sizes, then read from the files as far as the shard needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from flowtrain_lightning.data.batch import PackedBatch, PackedMedia, RankShard, StepBatch
from flowtrain_lightning.data.features.feature_store import FeatureStore
from flowtrain_lightning.data.loading.collate import pack_sequences, padding_microbatch
from flowtrain_lightning.data.loading.encoder_media import EncoderMedia
from flowtrain_lightning.data.loading.sample_loader import SampleLoader
from flowtrain_lightning.data.loading.workers import PackedParts, SharedMemoryBatch
from flowtrain_lightning.data.node.step_records import SharedRecords
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.sources.stream_of_samples import SampleStream
from flowtrain_lightning.data.steps.sampler import Sampling
from flowtrain_lightning.data.steps.step_packing import StepPacking
from flowtrain_lightning.data.steps.stream_steps import StreamEnded, StreamSteps
from flowtrain_lightning.data.steps.token_stream import TokenStream, saved_stream, stream_state
from flowtrain_lightning.packing import IntArray, SampleSizes, StepPlan
from flowtrain_lightning.packing.batches_behind import generated_items
from flowtrain_lightning.packing.media_pieces import in_pieces, whole_items
from flowtrain_lightning.packing.sample_stream import StreamStep
from flowtrain_lightning.packing.step_members import StepMembers

_PIECES_OF_A_BATCH = 8
"""A piece of a media item has at most such a part of an encoder batch's patches: fine pieces fill batches and ranks."""


@dataclass(frozen=True)
class NodeRecords:
    """A rank's way to its node's reader, for the records of steps.

    Attributes:
        records: the reader's.
        shards: of all ranks of the node.
    """

    records: SharedRecords
    shards: tuple[RankShard, ...]


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
        cuts_media: the encoder takes moments of clips and tiles of pictures apart, so that pieces are media items.
        node: reads the records of steps for all ranks of the node; None: this rank reads its own.
    """

    samples: SampleLoader
    sampling: Sampling | TokenStream | StreamSteps
    shard: RankShard
    packing: StepPacking
    pad_to_budget: bool = False
    unset_settings: frozenset[str] = frozenset()
    stores: Mapping[str, FeatureStore] = field(default_factory=dict)
    shares: bool = True
    cuts_media: bool = False
    node: NodeRecords | None = None

    def __len__(self) -> int:
        if self.sampling.steps is None:
            raise TypeError("How many steps an epoch of a stream has is not known.")
        return self.sampling.steps

    def __getitem__(self, step: tuple[int, int, StepPacking]) -> SharedMemoryBatch | None:
        parts = self.parts(*step)
        return None if parts is None else parts.packed()

    def parts(self, epoch: int, step: int, packing: StepPacking) -> PackedParts | None:
        """This rank's shard of one step, taken apart; None where the stream has ended.

        Raises:
            DataError: a record or media item cannot be used.
        """
        try:
            batch = self.load(epoch, step, packing)
        except StreamEnded:
            return None
        return PackedParts.of(batch, self._stream_state())

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
        return packing.plan(self.sizes(chosen, packing), chosen, self.shard.members, microbatches)

    def sizes(self, samples: IntArray, packing: StepPacking | None = None) -> SampleSizes:
        """The sizes of these samples as steps take them: large media in pieces, equal ones told where they are shared.

        Args:
            samples: ``[n]`` indices into the source, in that order.
            packing: that holds; None is as the run began.
        """
        sizes = self.samples.source.sizes(samples)
        if self.samples.augment is not None or not self.shares:  # chance makes two pictures of one
            sizes = replace(sizes, media_content=None)
        if self.cuts_media:
            sizes = in_pieces(sizes, self.most_patches(packing))
        return sizes

    def most_patches(self, packing: StepPacking | None = None) -> int:
        """Patches of a piece of a media item, where the encoder takes pieces; see `sizes` for ``packing``."""
        return (packing or self.packing).encoder_budget // _PIECES_OF_A_BATCH

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
        record_of = self._records(plan, epoch, step)
        microbatches: tuple[PackedBatch | None, ...] = ()
        media: dict[str, tuple[PackedMedia | None, ...]] = {}
        padding_media: dict[str, PackedMedia] = {}
        for role, member in shard.own.items():
            batches = plan.batches[role][member]
            if role == shard.members.trunk:
                microbatches = tuple(self._microbatch(plan, samples, record_of) for samples in batches)
                continue
            store = self.stores.get(role)
            read = EncoderMedia(self.samples, plan, batches, epoch, record_of, store, apart=self.cuts_media)
            media[role] = tuple(read.packed())
            if shard.members.meeting(role).passes and len(items := _encoded_by(role, shard.members, plan.sizes)):
                padding_media[role] = read.one_part(int(items[plan.sizes.media_patches[items].argmin()]))
        return StepBatch(plan, shard, microbatches, media, epoch, step, padding_media)

    def needed(self, plan: StepPlan, shard: RankShard | None = None) -> list[int]:
        """The samples of which this rank, or that of ``shard``, holds tokens or media, in the order of their source."""
        wanted, shard = np.zeros(len(plan.samples), dtype=bool), shard or self.shard
        for role, member in shard.own.items():
            for items in plan.batches[role][member]:
                wanted[items if role == shard.members.trunk else plan.sizes.media_sample[items]] = True
        needed: list[int] = np.unique(plan.samples[wanted]).tolist()
        return needed

    def _records(self, plan: StepPlan, epoch: int, step: int) -> Callable[[int], Record]:
        """Gives records of a step; each was read once, for its tokens and for its images."""
        needed, source = self.needed(plan), self.samples.source
        record_of = cache(source.record)
        if self.node is not None:
            of_node = Counter(chain(*(self.needed(plan, shard) for shard in self.node.shards)))
            found = self.node.records.of_step((epoch, step), dict(sorted(of_node.items())), needed)
            record_of = cache(self.node.records.record)
        elif isinstance(source, SampleStream):
            found = source.records(needed)
        else:
            found = [record_of(sample) for sample in needed]  # in their order, since some stores are read forward
        held = dict(zip(needed, found, strict=True))
        return lambda sample: held[sample] if sample in held else record_of(sample)

    def _stream_state(self) -> dict[str, Any] | None:
        if isinstance(self.sampling, StreamSteps):
            return self.sampling.state
        return saved_stream(self.sampling.state) if isinstance(self.sampling, TokenStream) else None

    def _microbatch(self, plan: StepPlan, members: IntArray, record_of: Callable[[int], Record]) -> PackedBatch | None:
        if len(members) == 0:
            return padding_microbatch() if self.shard.members.meeting(plan.graph.trunk).passes else None
        sizes = whole_items(plan.sizes.select(members))
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


def _encoded_by(role: str, members: StepMembers, sizes: SampleSizes) -> IntArray:
    """The media items of a step that a role encodes or generates."""
    modality = members.graph.modality_of(role)
    if modality is not None:
        return sizes.of_modality(modality)
    every = np.arange(len(sizes.media_patches), dtype=np.int64)
    return np.setdiff1d(every, generated_items(sizes, members.graph), assume_unique=True)
