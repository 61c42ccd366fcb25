"""What an encoder rank does in a step: forward, hand over features, and backward when their gradients are here."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

import torch
from torch import Tensor

from flowtrain_lightning.allocator.roles import ENCODER
from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.packing.activations import recomputed_batches
from flowtrain_lightning.pool import Key
from flowtrain_lightning.runtime.lane import LaneContext, Schedule
from flowtrain_lightning.runtime.room import FeatureSpec, feature_order
from flowtrain_lightning.runtime.step import Step
from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE

STEPS_AHEAD = 8
"""How many later steps a frozen encoder may have begun: a bound on loaded pixels where few of them hold media."""


class EncoderLane:
    """One encoder rank's work.

    Args:
        desk: what the lane works with.
        backbone_ranks: global rank of every backbone rank.
        kept_batches: encoder batches whose activations may be kept at a time.
    """

    def __init__(self, desk: LaneContext, backbone_ranks: tuple[int, ...], kept_batches: int) -> None:
        self._desk = desk
        self._backbone_ranks = backbone_ranks
        self._kept_batches = kept_batches
        self._published: dict[tuple[str, int], int] = {}

    def run(self, step: Step, spec: FeatureSpec | None) -> Schedule:
        """Works through the step's encoder batches in the plan's order.

        Args:
            step: the step.
            spec: what a row of features is; None only in a step without media.
        """
        if spec is not None:
            yield from self._reserve(step, spec)
            yield from self._train(step) if step.trains else self._publish_all(step)

    def work_ahead(self, step: Step, spec: FeatureSpec, steps_left: int) -> bool:
        """Encodes one batch of a later step, if there is one and room for it; for encoders that do not train.

        Args:
            step: the step that runs; this lane has done its part of it.
            spec: what a row of features is.
            steps_left: steps of this stage that will follow.

        Returns:
            whether a batch was encoded.
        """
        for distance in range(1, min(steps_left, STEPS_AHEAD) + 1):
            following = step.batch.following(distance)
            if following is None:
                return False
            later = Step(following, step.stage, step.index + distance, trains=False)
            for number in self._unpublished(later):
                rooms = [spec.room(later.plan.entries[entry].rows) for entry in self._entries(later, number)]
                if not self._desk.pool.fits(rooms, ahead=True):
                    return False
                for entry, parts in self._split(later, number, self._forward(later, number, keep=False)):
                    placed = self._put(later, entry, parts, ahead=True)
                    assert placed, "there was room for the whole batch"
                self._published[later.stage, later.index] = number + 1
                return True
        return False

    # ---- an encoder that does not train -------------------------------------------------------------------------

    def _publish_all(self, step: Step) -> Schedule:
        for number in self._unpublished(step):
            while not self._has_room(step, number):
                yield "room for features in the pool"
            yield from self._publish(step, number, self._forward(step, number, keep=False))
            yield None
        self._published.pop((step.stage, step.index), None)

    def _unpublished(self, step: Step) -> list[int]:
        done = self._published.get((step.stage, step.index), 0)
        return [n for n, media in enumerate(step.batch.encoder_batches) if n >= done and media is not None]

    # ---- an encoder that trains ---------------------------------------------------------------------------------

    def _train(self, step: Step) -> Schedule:
        assert step.batch.shard.encoder_rank is not None
        recomputed = recomputed_batches(step.plan, self._kept_batches)[step.batch.shard.encoder_rank]
        forwards = deque(self._unpublished(step))
        backwards: deque[AwaitingBackward] = deque()
        while forwards or backwards:
            collected = self._collect_gradients(step, backwards)
            kept = sum(batch.outputs is not None for batch in backwards)
            may_run = bool(forwards) and (forwards[0] in recomputed or kept < self._kept_batches)
            if may_run and self._has_room(step, forwards[0]):
                number = forwards.popleft()
                entries, keep = self._entries(step, number), number not in recomputed
                features = self._forward(step, number, keep=keep)
                backwards.append(AwaitingBackward(step, number, entries, features, keep))
                for reason in self._publish(step, number, features):
                    yield None if self._collect_gradients(step, backwards) else reason
            elif backwards and backwards[0].is_complete:
                self._backward(step, backwards.popleft())
            elif not collected:
                yield self._waiting_for(step, may_run, backwards)
                continue
            yield None

    def _waiting_for(self, step: Step, may_run: bool, backwards: deque[AwaitingBackward]) -> str:
        if may_run:
            return "room for features in the pool"
        return f"gradients of encoder batch {backwards[0].number}"

    def _collect_gradients(self, step: Step, backwards: deque[AwaitingBackward]) -> bool:
        # Whatever has arrived is copied out at once, so that a backbone rank never waits for room because this lane
        # has not come to that batch yet.
        pool = self._desk.pool
        arrived = [(batch, keys) for batch in backwards if (keys := pool.arrived(batch.missing))]
        if arrived:
            with self._desk.timeline.span(ENCODER, COMMUNICATION, "gradients", step.place):
                for batch, keys in arrived:
                    batch.collect(keys, self._desk)
        return bool(arrived)

    def _backward(self, step: Step, batch: AwaitingBackward) -> None:
        desk = self._desk
        outputs = batch.outputs
        if outputs is None:
            outputs = self._forward(step, batch.number, keep=True)
        desk.enter(f"backward of encoder batch {batch.number}", step)
        with desk.timeline.span(ENCODER, COMPUTE, "backward", step.place, batch.number):
            desk.compute.backward(outputs, tuple(batch.gradients))

    # ---- both ---------------------------------------------------------------------------------------------------

    def _reserve(self, step: Step, spec: FeatureSpec) -> Schedule:
        batches = [self._entries(step, number) for number in self._unpublished(step)]
        order = feature_order(step.plan, spec, batches)
        while not self._desk.pool.reserve({step.feature_key(entry): room for entry, room in order.items()}):
            yield "room for features in the pool"

    def _has_room(self, step: Step, number: int) -> bool:
        return self._desk.pool.has_room([step.feature_key(entry) for entry in self._entries(step, number)])

    def _forward(self, step: Step, number: int, *, keep: bool) -> tuple[Tensor, ...]:
        desk = self._desk
        rank = step.batch.shard.encoder_rank
        assert rank is not None
        desk.enter(f"forward of encoder batch {number}", step)
        with desk.timeline.span(ENCODER, COMPUTE, "forward", step.place, number), torch.set_grad_enabled(keep):
            return desk.compute.encode(
                self._media(step, number), step=step.name, number=step.batch_number(rank, number)
            )

    def _publish(self, step: Step, number: int, features: tuple[Tensor, ...]) -> Schedule:
        for entry, parts in self._split(step, number, features):
            while not self._put(step, entry, parts, ahead=False):
                yield "room for features in the pool"

    def _split(self, step: Step, number: int, features: tuple[Tensor, ...]) -> list[tuple[int, list[Tensor]]]:
        entries = self._entries(step, number)
        rows = [step.plan.entries[entry].rows for entry in entries]
        parts = zip(*(torch.split(feature.detach(), rows) for feature in features), strict=True)
        return [(entry, list(part)) for entry, part in zip(entries, parts, strict=True)]

    def _put(self, step: Step, entry: int, parts: list[Tensor], *, ahead: bool) -> bool:
        reader = self._backbone_ranks[step.plan.entries[entry].backbone_rank]
        with self._desk.timeline.span(ENCODER, COMMUNICATION, "features", step.place):
            return self._desk.pool.put(step.feature_key(entry), parts, [reader], ahead=ahead) is not None

    def _entries(self, step: Step, number: int) -> list[int]:
        rank = step.batch.shard.encoder_rank
        assert rank is not None
        return step.entries_of_encoder_batch[rank, number]

    def _media(self, step: Step, number: int) -> PackedMedia:
        media = step.batch.encoder_batches[number]
        assert media is not None
        return media


class AwaitingBackward:
    """An encoder batch between its forward and its backward.

    Attributes:
        number: its position in this rank's order.
        outputs: its features with their graph, or None where the forward will be computed again.
        gradients: what has arrived so far, shaped as the features; None for a tensor of them that took no part in the
            loss.
        missing: key of gradients that are not here yet -> the first of their rows.
    """

    def __init__(self, step: Step, number: int, entries: list[int], features: tuple[Tensor, ...], keep: bool) -> None:
        self.number = number
        self.outputs = features if keep else None
        self.gradients: list[Tensor | None] = [None] * len(features)
        starts = accumulate((step.plan.entries[entry].rows for entry in entries[:-1]), initial=0)
        self.missing = {step.gradient_key(entry): start for entry, start in zip(entries, starts, strict=True)}
        self._rows = features[0].shape[0]

    @property
    def is_complete(self) -> bool:
        """All gradients are here."""
        return not self.missing

    def collect(self, arrived: list[Key], desk: LaneContext) -> None:
        """Copies gradients that have arrived and gives their room back."""
        for key in arrived:
            lease = desk.pool.get(key)
            assert lease is not None, "it has arrived"
            start = self.missing.pop(key)
            for level, part in enumerate(lease.tensors):
                if part.shape[0]:
                    self._whole(level, part, desk.compute.device)[start : start + part.shape[0]].copy_(part)
            lease.release()

    def _whole(self, level: int, part: Tensor, device: torch.device) -> Tensor:
        whole = self.gradients[level]
        if whole is None:
            whole = torch.zeros((self._rows, *part.shape[1:]), dtype=part.dtype, device=device)
            self.gradients[level] = whole
        return whole
