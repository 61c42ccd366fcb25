"""What a backbone rank does in a step: wait for features, forward, backward, return their gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice, repeat
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.allocator import BACKBONE
from flowtrain_lightning.compute.compute import FeatureSpec, as_features
from flowtrain_lightning.compute.copy_stream import CopyStream
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
        streams = cycle(self._context.compute.copies[BACKBONE])
        waiting = deque(map(MicrobatchFeatures, repeat(step), step.program.microbatches, streams))
        if step.trains and spec is not None and self._answers:
            while not self._context.pool.reserve(step.reserved_gradients(spec), ahead=True):
                yield "bytes for gradients in the pool"
        for number, packed in enumerate(step.batch.microbatches):
            features = waiting[0]
            while features.missing:
                # The next microbatch's features are fetched as well: so the encoder's bytes are free sooner, and the
                # backbone finds them here when it gets there.
                fetched = False
                for each in islice(waiting, 2):
                    fetched |= each.fetch(step, self._context)
                if features.missing and not fetched:
                    yield f"features of microbatch {number}"
            waiting.popleft()
            if packed is not None:
                if spec is not None and not features.tensors and step.batch.shard.meeting(BACKBONE).passes:
                    # Other ranks may have media now, and sum gradients of all that a layout gathers together. So what
                    # only features meet, such as a projector, takes part here as well.
                    modality = step.plan.entries[0].modality  # of all of them, where ranks share weights
                    features.tensors = {modality: spec.no_rows(self._context.compute.device)}
                    packed = replace(packed, media_positions={modality: packed.tokens[:0]})
                self._compute(step, number, packed, features, outputs)
                if step.trains and self._answers:
                    yield from self._return_gradients(step, features)
            yield Progress.UNIT

    def _compute(
        self, step: Step, number: int, packed: PackedBatch, features: MicrobatchFeatures, outputs: list[Any]
    ) -> None:
        """Forward and backward of one microbatch; its features are leaves of the graph, and have gradients then."""
        context, rank = self._context, step.batch.shard.backbone_rank
        assert rank is not None
        merged: Features = {}
        for modality, tensors in features.tensors.items():
            context.hand_over(features.copies, tensors, BACKBONE, step)
            for tensor in tensors:
                tensor.requires_grad_(modality in step.answered and tensor.is_floating_point())
            merged |= as_features(modality, tensors)
        context.enter(f"compute microbatch {number}", step)
        if step.stage == "train" and number == 0:
            context.compute.check_context(packed, merged)
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
            gradient = torch.full_like(result, 0.0 if is_padding else 1.0)
            context.compute.backward(BACKBONE, (result,), (gradient,), last=last)
        context.timeline.stop(start, BACKBONE, COMPUTE, "microbatch", step.stage, step.index, number)

    def _return_gradients(self, step: Step, features: MicrobatchFeatures) -> Schedule:
        start, work = self._context.timeline.start(), features.work
        for entry, slices in work.slices.items():
            if work.modalities[entry] not in step.answered:
                continue
            leaves = features.tensors[work.modalities[entry]]
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

    def fetch(self, step: Step, context: LaneContext) -> bool:
        """Copies entries that have arrived and releases them at once; says whether there were any."""
        arrived = context.pool.arrived(self.missing)
        if not arrived:
            return False
        with self.copies.copying():
            leases = list(map(context.pool.get, arrived))  # on a GPU this stream waits for them here
            start = context.timeline.start()
            for key, lease in zip(arrived, leases, strict=True):
                assert lease is not None, "it has arrived"
                self._take(self.missing.pop(key), lease.tensors, context.compute.device)
                lease.release()
            context.timeline.stop(start, BACKBONE, COMMUNICATION, "features", step.stage, step.index)
        return True

    def _take(self, entry: int, parts: tuple[Tensor, ...], device: torch.device) -> None:
        modality = self.work.modalities[entry]
        if modality not in self.tensors:
            rows = self.work.rows[modality]
            made = tuple(torch.empty((rows, *part.shape[1:]), dtype=part.dtype, device=device) for part in parts)
            self.tensors = dict(sorted({**self.tensors, modality: made}.items()))
        for whole, part in zip(self.tensors[modality], parts, strict=True):
            taken = 0
            for run in self.work.slices[entry]:
                count = run.stop - run.start
                whole[run].copy_(part[taken : taken + count], non_blocking=True)  # host memory of the pool is pinned
                taken += count


def _rows(gradient: Tensor, slices: tuple[slice, ...]) -> Tensor:
    """The rows of one entry; a view where they are in one piece."""
    return gradient[slices[0]] if len(slices) == 1 else torch.cat([gradient[run] for run in slices])
