"""One rank's part of any step: planned from sizes, then only what the part needs is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from flowtrain_lightning.data.batch import PackedBatch, PackedMedia, RankShard, StepBatch
from flowtrain_lightning.data.collate import pack_pictures, pack_sequences
from flowtrain_lightning.data.parcel import SharedMemoryBatch
from flowtrain_lightning.data.planning import PackingConfig
from flowtrain_lightning.data.records import Record
from flowtrain_lightning.data.samples import SampleLoader
from flowtrain_lightning.data.sampling import Sampling
from flowtrain_lightning.data.token_stream import TokenStream, stream_state
from flowtrain_lightning.packing import IntArray, StepPlan


@dataclass(frozen=True)
class StepDataset(Dataset[SharedMemoryBatch]):
    """Steps by epoch, number and the planning that holds in it. Reading one depends on these alone.

    Attributes:
        samples: loads samples.
        sampling: which samples are in a step.
        part: what this rank holds of every step.
        planning: how they are packed, where the loader says nothing else.
        pad_to_budget: fill every microbatch up to the token budget.
        unset_settings: names of settings that the user did not give: a checkpoint's take their place.
    """

    samples: SampleLoader
    sampling: Sampling | TokenStream
    part: RankShard
    planning: PackingConfig
    pad_to_budget: bool = False
    unset_settings: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return self.sampling.steps

    def __getitem__(self, place: tuple[int, int, PackingConfig]) -> SharedMemoryBatch:
        batch = self.load(*place)
        return SharedMemoryBatch.of(batch, self.sampling.state if isinstance(self.sampling, TokenStream) else None)

    def plan(self, epoch: int, step: int, planning: PackingConfig | None = None) -> StepPlan:
        """The whole step's plan, equal on all ranks; None plans as the run began."""
        planning, microbatches = planning or self.planning, None
        if isinstance(self.sampling, TokenStream):
            found = self.sampling.step(epoch, step)
            chosen = self.sampling.samples(found.samples)
            microbatches = planning.arrange(found, self.sampling.settings, self.part)
        else:
            chosen = self.sampling.step(epoch, step)
        return planning.plan(self.samples.source.sizes(chosen), chosen, self.part, microbatches)

    def resumed_from(self, state: Mapping[str, Any]) -> StepDataset:
        """The same steps as when ``state`` was saved, in what the user left open."""
        planning, sampling = self.planning.resumed_from(state["planning"], self.unset_settings), self.sampling
        if isinstance(sampling, TokenStream) and state["stream"] is not None:
            sampling = sampling.resumed_from(state["settings"], stream_state(state["stream"]), self.unset_settings)
        return replace(self, planning=planning, sampling=sampling)

    def load(self, epoch: int, step: int, planning: PackingConfig | None = None) -> StepBatch:
        """This rank's part of one step.

        Raises:
            DataError: a record or picture cannot be used.
        """
        plan, part = self.plan(epoch, step, planning), self.part
        microbatches: tuple[PackedBatch | None, ...] = ()
        encoder_batches: tuple[PackedMedia | None, ...] = ()
        if part.backbone_rank is not None:
            microbatches = tuple(self._microbatch(plan, members) for members in plan.microbatches[part.backbone_rank])
        if part.encoder_rank is not None:
            encoder_batches = tuple(
                self._encoder_batch(plan, media, epoch) for media in plan.encoder_batches[part.encoder_rank]
            )
        return StepBatch(plan, part, microbatches, encoder_batches, epoch, step)

    def _microbatch(self, plan: StepPlan, members: IntArray) -> PackedBatch | None:
        if len(members) == 0:
            return None
        sizes = plan.sizes.select(members)
        samples = plan.samples[members].tolist()
        rows = np.split(sizes.media_rows, sizes.media_start[1:-1])
        sequences = [
            self.samples.sequence(sample, tokens, of_sample)
            for sample, tokens, of_sample in zip(samples, sizes.tokens.tolist(), rows, strict=True)
        ]
        return pack_sequences(sequences, samples, pad_to=self.planning.token_budget if self.pad_to_budget else None)

    def _encoder_batch(self, plan: StepPlan, media: IntArray, epoch: int) -> PackedMedia | None:
        if len(media) == 0:
            return None
        owners = plan.sizes.media_sample[media]
        numbers = media - plan.sizes.media_start[owners]
        samples = plan.samples[owners]
        rows = plan.sizes.media_rows[media]
        records: dict[int, Record] = {}
        pictures = []
        for sample, number, count in zip(samples.tolist(), numbers.tolist(), rows.tolist(), strict=True):
            if sample not in records:
                records[sample] = self.samples.source.record(sample)
            pictures.append(self.samples.picture(records[sample], sample, number, count, epoch))
        return pack_pictures(pictures)
