"""What a backbone rank does in a step: wait for features, forward, backward, return their gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.allocator import BACKBONE
from flowtrain_lightning.compute.copy_stream import CopyStream
from flowtrain_lightning.compute.features import FeatureSpec, as_features
from flowtrain_lightning.data import Features, PackedBatch
from flowtrain_lightning.pool import Key
from flowtrain_lightning.runtime.program import MicrobatchWork
from flowtrain_lightning.runtime.schedule import LaneContext, Progress, Schedule, Step
from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE


class BackboneLane:
    """One backbone rank's work.

    Args:
        context: what the lane works with.
        encoders: for each data-parallel rank that encodes, its global ranks.
        answers: this rank returns the gradients of features, and predictions; of ranks that share a microbatch, which
            all have the same, the first does.
        counts: its losses and logged values count; of tensor ranks, which all have the same, those of the first do.
    """

    def __init__(
        self,
        context: LaneContext,
        encoders: Sequence[tuple[int, ...]],
        *,
        answers: bool = True,
        counts: bool = True,
    ) -> None:
        self._context = context
        self._encoders = encoders
        self._answers = answers
        self._counts = counts

    def run(self, step: Step, spec: FeatureSpec | None, outputs: list[Any]) -> Schedule:
        """Works through the step's microbatches in the plan's order.

        Args:
            step: the step.
            spec: what a row of features is; None only in a step without media.
            outputs: to which predictions are appended.
        """
        # Made before the first features are here, when this lane has nothing else to do.
        streams = cycle(self._context.compute.copies)
        waiting = deque(MicrobatchFeatures(step, work, next(streams)) for work in step.program.microbatches)
        if step.trains and spec is not None and self._answers:
            while not self._context.pool.reserve(step.reserved_gradients(spec), ahead=True):
                yield "bytes for gradients in the pool"
        for number, packed in enumerate(step.batch.microbatches):
            features = waiting[0]
            while features.missing:
                # The next microbatch's features are fetched as well: so the encoder's bytes are free sooner, and the
                # backbone finds them here when it gets there.
                fetched = [self._fetch(step, each) for each in islice(waiting, 2)]
                if features.missing and not any(fetched):
                    yield f"features of microbatch {number}"
            waiting.popleft()
            if packed is not None:
                if spec is not None and not features.tensors and step.batch.shard.pads_microbatches:
                    # Other ranks may have media now, and sum gradients of all that a layout gathers together. So what
                    # only features meet, such as a projector, takes part here as well.
                    modality = step.plan.entries[0].modality  # of all of them, where ranks share weights
                    features.tensors = {modality: spec.no_rows(self._context.compute.device)}
                    packed = replace(packed, media_positions={modality: packed.tokens[:0]})
                leaves = self._compute(step, number, packed, features, outputs)
                if step.trains and self._answers:
                    yield from self._return_gradients(step, features.work, leaves)
            yield Progress.UNIT

    def _fetch(self, step: Step, features: MicrobatchFeatures) -> bool:
        arrived = self._context.pool.arrived(features.missing)
        if arrived:
            with features.copies.copying():
                start = self._context.timeline.start()
                features.fetch(arrived, self._context)
                self._context.timeline.stop(start, BACKBONE, COMMUNICATION, "features", step.stage, step.index)
        return bool(arrived)

    def _compute(
        self, step: Step, number: int, packed: PackedBatch, features: MicrobatchFeatures, outputs: list[Any]
    ) -> dict[str, tuple[Tensor, ...]]:
        """Forward and backward of one microbatch; returns its features, by modality, as leaves of the graph."""
        context, rank = self._context, step.batch.shard.backbone_rank
        assert rank is not None
        features.copies.hand_over([tensor for given in features.tensors.values() for tensor in given])
        leaves = {
            modality: tuple(t.requires_grad_(step.answers(modality) and t.is_floating_point()) for t in given)
            for modality, given in features.tensors.items()
        }
        merged: Features = {}
        for modality, given in leaves.items():
            merged |= as_features(modality, given)
        context.enter(f"compute microbatch {number}", step)
        start = context.timeline.start()
        result = context.compute.microbatch(
            packed,
            merged,
            stage=step.stage,
            step=step.name,
            number=number * len(step.plan.microbatches) + rank,
            counts=self._counts,
        )
        step.executed[BACKBONE].append(f"microbatch {number}")
        is_padding = not packed.samples
        if step.stage == "predict":
            outputs += [] if is_padding or not self._answers else [result]
        elif step.stage == "train" and result.requires_grad:
            last = number == step.program.last_microbatch
            context.compute.backward(
                (BACKBONE,), (result,), (torch.full_like(result, 0.0 if is_padding else 1.0),), last=last
            )
        context.timeline.stop(start, BACKBONE, COMPUTE, "microbatch", step.stage, step.index, number)
        return leaves

    def _return_gradients(self, step: Step, work: MicrobatchWork, features: dict[str, tuple[Tensor, ...]]) -> Schedule:
        start = self._context.timeline.start()
        for entry, slices in work.slices.items():
            if not step.answers(work.modalities[entry]):
                continue
            leaves = features[work.modalities[entry]]
            # No rows stand for no gradient: what took no part in the loss keeps None, as it would in one process.
            gradients = [leaf.detach()[:0] if leaf.grad is None else _rows(leaf.grad, slices) for leaf in leaves]
            key, readers = Key(step.gradients, step.index, entry), self._encoders[work.owners[entry]]
            # An encoder that trains never works ahead, so that region is free for gradients. Were they to share one
            # with features, two ranks with both lanes could each fill it with what the other must read first.
            while self._context.pool.put(key, gradients, readers, ahead=True) is None:
                yield "bytes for gradients in the pool"
                start = self._context.timeline.start()
        self._context.timeline.stop(start, BACKBONE, COMMUNICATION, "gradients", step.stage, step.index)


class MicrobatchFeatures:
    """The features of one microbatch, gathered from their entries as they arrive.

    Attributes:
        work: which entries they are, and where their rows belong.
        copies: the stream on which they are fetched.
        missing: key of an entry that is not here yet -> its number.
        tensors: modality -> the features, in the order of names; without those of which no entry is here yet.
    """

    def __init__(self, step: Step, work: MicrobatchWork, copies: CopyStream) -> None:
        self.work = work
        self.copies = copies
        self.missing = {Key(step.features, step.index, entry): entry for entry in work.slices}
        self.tensors: dict[str, tuple[Tensor, ...]] = {}

    def fetch(self, arrived: list[Key], context: LaneContext) -> None:
        """Copies entries that have arrived and releases them at once."""
        for key in arrived:
            lease = context.pool.get(key)
            assert lease is not None, "it has arrived"
            parts, entry = lease.tensors, self.missing.pop(key)
            slices, modality = self.work.slices[entry], self.work.modalities[entry]
            if modality not in self.tensors:
                count = self.work.rows[modality]
                made = tuple(
                    torch.empty((count, *part.shape[1:]), dtype=part.dtype, device=context.compute.device)
                    for part in parts
                )
                self.tensors = dict(sorted({**self.tensors, modality: made}.items()))
            for whole, part in zip(self.tensors[modality], parts, strict=True):
                for run, rows in zip(slices, torch.split(part, [run.stop - run.start for run in slices]), strict=True):
                    whole[run].copy_(rows, non_blocking=True)  # host memory of the pool is pinned
            lease.release()


def _rows(gradient: Tensor, slices: tuple[slice, ...]) -> Tensor:
    """The rows of one entry; a view where they are in one piece."""
    return gradient[slices[0]] if len(slices) == 1 else torch.cat([gradient[run] for run in slices])
