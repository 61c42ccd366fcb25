"""What an encoder rank does in a step: forward, publish features, and backward when their gradients are here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from flowtrain_lightning.allocator import BACKBONE, ENCODER, modality_of
from flowtrain_lightning.compute.compute import FeatureSpec
from flowtrain_lightning.compute.copy_stream import CopyStream
from flowtrain_lightning.packing.step_work import STEPS_AHEAD
from flowtrain_lightning.pool import Key
from flowtrain_lightning.runtime.program import PADDING, EncoderBatchWork
from flowtrain_lightning.runtime.schedule import LaneContext, Progress, Schedule, Step
from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE

_ROOM = "bytes for features in the pool"


class EncoderLane:
    """One encoder rank's work.

    Args:
        context: what the lane works with.
        readers: for each data-parallel rank of the backbone, its global ranks.
        publishes: this rank puts features into the pool; of tensor ranks, which all have the same, the first does.
        role: the rank's, which is named after a modality where there are several encoders.
        meets_in_forwards: other ranks need this one in every forward; else padding batches are for backwards alone.
    """

    def __init__(
        self,
        context: LaneContext,
        readers: Sequence[tuple[int, ...]],
        *,
        publishes: bool = True,
        role: str = ENCODER,
        meets_in_forwards: bool = True,
    ) -> None:
        self._context = context
        self._readers = readers
        self._publishes = publishes
        self._role = role
        self._modality = modality_of(role)
        self._meets_in_forwards = meets_in_forwards
        self._ahead: dict[tuple[str, int], list[int]] = {}  # stage and step -> encoder batches that were encoded ahead

    def run(self, step: Step, spec: FeatureSpec) -> Schedule:
        """Works through the step's encoder batches in the program's order.

        Args:
            step: the step, which has media items.
            spec: what a row of features is.
        """
        pool, batches = self._context.pool, step.program.encoder_batches
        done = self._done_ahead(step)
        for number in self._ahead.pop((step.stage, step.index), ()):
            step.executed[self._role].append(f"forward {number}")
        while self._publishes and not pool.reserve(step.reserved_features(spec, done)):
            yield _ROOM
        if step.trains if self._modality is None else self._modality in step.answered:
            yield from self._train(step)
            return
        for number, batch in batches.items():
            if number >= done:
                while not self._has_room(step, batch):
                    yield _ROOM
                step.executed[self._role].append(f"forward {number}")
                yield from self._encode(step, batch)
                yield Progress.UNIT

    def find_ahead(self, later: Callable[[int], Step | None], steps_left: int) -> tuple[Step, int] | None:
        """The next encoder batch of later steps, and its step; None where there is none within `STEPS_AHEAD`.

        Args:
            later: gives the n-th step after the one that runs, from 1; None past the end.
            steps_left: steps of this stage that will follow.
        """
        for distance in range(1, min(steps_left, STEPS_AHEAD) + 1):
            if (step := later(distance)) is None:
                return None
            done = self._done_ahead(step)
            number = next((number for number in step.program.encoder_batches if number >= done), None)
            if number is not None:
                return step, number
        return None

    def fits_ahead(self, step: Step, number: int, spec: FeatureSpec) -> bool:
        """Whether there is room now for the features of an encoder batch of a later step.

        Args:
            step: the later one.
            number: of the batch, as its program calls it.
            spec: what a row of features is.
        """
        nbytes = spec.entry_nbytes(step.program.encoder_batches[number].rows)
        return not self._publishes or self._context.pool.fits(nbytes, ahead=True)

    def encode_ahead(self, step: Step, number: int) -> None:
        """Encodes and publishes what `find_ahead` found and `fits_ahead` has room for, of an encoder that is frozen."""
        batch = step.program.encoder_batches[number]
        for reason in self._encode(step, batch, ahead=True):
            raise AssertionError(f"it was to wait for {reason}, but there was room for the whole batch")
        self._ahead.setdefault((step.stage, step.index), []).append(number)

    def _encode(self, step: Step, batch: EncoderBatchWork, ahead: bool = False) -> Schedule:
        """What there is to do of a batch that has no backward."""
        if batch.number != PADDING or self._meets_in_forwards:
            yield from self._publish(step, batch, self._forward(step, batch, keep=False), ahead)

    def _done_ahead(self, step: Step) -> int:
        """Encoder batches of a step below this number were encoded ahead of it."""
        return self._ahead.get((step.stage, step.index), [-1])[-1] + 1

    def _train(self, step: Step) -> Schedule:
        waiting: deque[AwaitingBackward] = deque()
        for kind, number in step.program.encoder_order:
            batch = step.program.encoder_batches[number]
            step.executed[self._role].append(f"{kind} {number}")
            # Whatever it waits for, it collects gradients: the bytes that they leave may be what the other lane needs.
            collected = self._collect(waiting, step)
            if kind == "forward":
                while not self._has_room(step, batch):
                    yield Progress.PART if collected else _ROOM
                    collected = self._collect(waiting, step)
                features = self._forward(step, batch, keep=not batch.recomputes)
                waiting.append(AwaitingBackward(step, batch, features, self._context))
                for reason in self._publish(step, batch, features):
                    yield Progress.PART if self._collect(waiting, step) else reason
            else:
                while waiting[0].missing:
                    yield Progress.PART if collected else f"gradients of encoder batch {number}"
                    collected = self._collect(waiting, step)
                last = (kind, number) == step.program.encoder_order[-1]
                self._backward(step, waiting.popleft(), last=last)
            yield Progress.UNIT

    def _has_room(self, step: Step, batch: EncoderBatchWork) -> bool:
        keys = [Key(step.features, step.index, entry) for entry in batch.entries]
        return not self._publishes or self._context.pool.has_room(keys)

    def _forward(self, step: Step, batch: EncoderBatchWork, *, keep: bool) -> tuple[Tensor, ...]:
        context, rank = self._context, step.batch.shard.encoder_rank
        is_padding = batch.number == PADDING
        media = step.batch.padding_media if is_padding else step.batch.encoder_batches[batch.number]
        assert rank is not None
        assert media is not None
        context.enter(f"forward of encoder batch {batch.number}", step)
        start = context.timeline.start()
        with torch.set_grad_enabled(keep):
            stream = batch.number * len(step.plan.encoder_batches) + rank
            features = context.compute.encode(self._role, media, step=step.name, number=stream)
        context.timeline.stop(start, ENCODER, COMPUTE, "forward", step.stage, step.index, batch.number)
        return features

    def _publish(
        self, step: Step, batch: EncoderBatchWork, features: tuple[Tensor, ...], ahead: bool = False
    ) -> Schedule:
        if batch.number == PADDING or not self._publishes:
            return
        start = self._context.timeline.start()
        parts = zip(*(torch.split(feature.detach(), batch.rows) for feature in features), strict=True)
        for entry, reader, part in zip(batch.entries, batch.readers, parts, strict=True):
            key = Key(step.features, step.index, entry)
            while self._context.pool.put(key, part, self._readers[reader], ahead=ahead) is None:
                yield _ROOM
                start = self._context.timeline.start()
        self._context.timeline.stop(start, ENCODER, COMMUNICATION, "features", step.stage, step.index)

    def _collect(self, waiting: deque[AwaitingBackward], step: Step) -> bool:
        """Copies all gradients that have arrived, so that a backbone rank never waits for this lane to come to them."""
        collected = False
        for batch in waiting:
            collected |= batch.collect(step, self._context)
        return collected

    def _backward(self, step: Step, waiting: AwaitingBackward, *, last: bool) -> None:
        context, batch = self._context, waiting.batch
        outputs = waiting.outputs
        if outputs is None:
            outputs = self._forward(step, batch, keep=True)
        if last and BACKBONE in step.ended and context.pool.is_settled:
            # From here on no other rank needs anything of this one but sums, in which a GPU may wait for the others.
            # The backbone's go first on every rank: the encoder's follow when both lanes have ended.
            context.compute.send_gradients(BACKBONE)
        context.enter(f"backward of encoder batch {batch.number}", step)
        context.hand_over(waiting.copies, waiting.gradients, ENCODER, step)
        start = context.timeline.start()
        context.compute.backward(self._role, outputs, tuple(waiting.gradients), last=last)
        context.timeline.stop(start, ENCODER, COMPUTE, "backward", step.stage, step.index, batch.number)


class AwaitingBackward:
    """An encoder batch between its forward and its backward.

    Attributes:
        batch: the encoder batch.
        copies: the stream on which its gradients are collected.
        outputs: its features with their graph, or None where the forward will be computed again.
        gradients: what has arrived so far, shaped as the features; None for a tensor of them that took no part in the
            loss.
        missing: key of gradients that are not here yet -> their rows.
    """

    def __init__(self, step: Step, batch: EncoderBatchWork, features: tuple[Tensor, ...], context: LaneContext) -> None:
        streams = context.compute.copies[ENCODER]
        self.batch = batch
        self.copies: CopyStream = streams[batch.number % len(streams)]
        self.outputs = None if batch.recomputes else features
        self.gradients: list[Tensor | None] = [None] * len(features)
        self._absent: set[int] = set()  # which tensors some entry had no gradient for, before any had one
        self.missing: dict[Key, slice] = {}
        for entry, count, end in zip(batch.entries, batch.rows, accumulate(batch.rows), strict=True):
            self.missing[Key(step.gradients, step.index, entry)] = slice(end - count, end)

    def collect(self, step: Step, context: LaneContext) -> bool:
        """Copies gradients that have arrived and releases their entries at once; says whether there were any."""
        arrived = context.pool.arrived(self.missing)
        if not arrived:
            return False
        with self.copies.copying():
            leases = list(map(context.pool.get, arrived))  # on a GPU this stream waits for them here
            start = context.timeline.start()
            for key, lease in zip(arrived, leases, strict=True):
                assert lease is not None, "it has arrived"
                rows = self.missing.pop(key)
                for level, part in enumerate(lease.tensors):
                    self._take(level, rows, part, context.compute.device)
                lease.release()
            context.timeline.stop(start, ENCODER, COMMUNICATION, "gradients", step.stage, step.index)
        return True

    def _take(self, level: int, rows: slice, part: Tensor, device: torch.device) -> None:
        whole = self.gradients[level]
        if not part.shape[0]:  # no rows stand for no gradient
            if whole is None:
                self._absent.add(level)
            else:
                whole[rows].zero_()
            return
        if whole is None:
            allocate = torch.zeros if level in self._absent else torch.empty  # each row is written once
            whole = allocate((sum(self.batch.rows), *part.shape[1:]), dtype=part.dtype, device=device)
            self.gradients[level] = whole
        whole[rows].copy_(part, non_blocking=True)  # host memory of the pool is pinned
