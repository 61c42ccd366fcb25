"""One rank's part of any step: planned from sizes, then only what the part needs is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset

from flowtrain_lightning.data.batch import PackedBatch, PackedMedia, StepBatch, StepPart
from flowtrain_lightning.data.collate import pack_pictures, pack_sequences
from flowtrain_lightning.data.parcel import Parcel
from flowtrain_lightning.data.records import Record
from flowtrain_lightning.data.samples import SampleLoader
from flowtrain_lightning.data.sampling import Sampling
from flowtrain_lightning.packing import IntArray, StepPlan, plan_step


@dataclass(frozen=True)
class StepDataset(Dataset[Parcel]):
    """Steps by ``(epoch, step)``. Reading one is a pure function of it, so any worker may do it.

    Attributes:
        samples: loads samples.
        sampling: which samples are in a step.
        part: what this rank holds of every step.
        token_budget: the most tokens of a microbatch.
        pad_to_budget: fill every microbatch up to the budget.
    """

    samples: SampleLoader
    sampling: Sampling
    part: StepPart
    token_budget: int
    pad_to_budget: bool = False

    def __len__(self) -> int:
        return self.sampling.steps

    def __getitem__(self, place: tuple[int, int]) -> Parcel:
        return Parcel.of(self.load(*place))

    def plan(self, epoch: int, step: int) -> StepPlan:
        """The whole step's plan, equal on all ranks."""
        chosen = self.sampling.step(epoch, step)
        return plan_step(
            self.samples.source.sizes(chosen),
            chosen,
            backbone_ranks=self.part.backbone_ranks,
            encoder_ranks=self.part.encoder_ranks,
            token_budget=self.token_budget,
            local=self.part.local,
        )

    def load(self, epoch: int, step: int) -> StepBatch:
        """This rank's part of one step.

        Raises:
            DataError: a record or picture cannot be used.
        """
        plan, part = self.plan(epoch, step), self.part
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
        return pack_sequences(sequences, samples, pad_to=self.token_budget if self.pad_to_budget else None)

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
