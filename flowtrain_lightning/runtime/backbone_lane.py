"""What a backbone rank does in a step: wait for features, forward, backward, return their gradients."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.allocator.roles import BACKBONE
from flowtrain_lightning.compute.compute import as_features
from flowtrain_lightning.data import Features, PackedBatch
from flowtrain_lightning.pool import Key
from flowtrain_lightning.runtime.lane import LaneContext, Schedule
from flowtrain_lightning.runtime.room import FeatureSpec, gradient_order
from flowtrain_lightning.runtime.step import Step, feature_places
from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE


class BackboneLane:
    """One backbone rank's work.

    Args:
        desk: what the lane works with.
        encoder_ranks: global rank of every encoder rank.
    """

    def __init__(self, desk: LaneContext, encoder_ranks: tuple[int, ...]) -> None:
        self._desk = desk
        self._encoder_ranks = encoder_ranks

    def run(self, step: Step, spec: FeatureSpec | None, outputs: list[Any]) -> Schedule:
        """Works through the step's microbatches in the plan's order.

        Args:
            step: the step.
            spec: what a row of features is; None only in a step without media.
            outputs: to which predictions are appended.
        """
        rank = step.batch.shard.backbone_rank
        assert rank is not None
        # Made before the first features are here, when this lane has nothing else to do.
        mailboxes = deque(
            MicrobatchFeatures(step, step.entries_of_microbatch.get((rank, number), []))
            for number in range(len(step.batch.microbatches))
        )
        if step.trains and spec is not None:
            yield from self._reserve(step, spec, [entry for mailbox in mailboxes for entry in mailbox.places])
        for number, packed in enumerate(step.batch.microbatches):
            mailbox = mailboxes[0]
            while not mailbox.is_full:
                # The next microbatch's features are fetched as well: so the encoder's room is free sooner, and the
                # backbone finds them here when it gets there.
                fetched = [self._fetch(each) for each in islice(mailboxes, 2)]
                if not mailbox.is_full and not any(fetched):
                    yield f"features of microbatch {number}"
            mailboxes.popleft()
            if packed is not None:
                yield from self._compute(step, number, packed, mailbox, outputs)

    def _compute(
        self, step: Step, number: int, packed: PackedBatch, mailbox: MicrobatchFeatures, outputs: list[Any]
    ) -> Schedule:
        desk = self._desk
        leaves = mailbox.leaves(step.trains)
        desk.enter(f"compute microbatch {number}", step)
        with desk.timeline.span(BACKBONE, COMPUTE, "microbatch", step.place, number):
            rank = step.batch.shard.backbone_rank
            assert rank is not None
            result = desk.compute.microbatch(
                packed,
                as_features(next(iter(packed.media_positions)), leaves) if leaves else Features(),
                stage=step.stage,
                step=step.name,
                number=step.microbatch_number(rank, number),
            )
            if step.stage == "predict":
                outputs.append(result)
            elif step.stage == "train" and result.requires_grad:
                desk.compute.backward((result,), (torch.ones_like(result),))
        if step.trains:
            yield from self._return_gradients(step, mailbox, leaves)
        yield None

    def _reserve(self, step: Step, spec: FeatureSpec, entries: list[int]) -> Schedule:
        order = gradient_order(step.plan, spec, entries)
        keyed = {step.gradient_key(entry): room for entry, room in order.items()}
        while not self._desk.pool.reserve(keyed, ahead=True):
            yield "room for gradients in the pool"

    def _return_gradients(self, step: Step, mailbox: MicrobatchFeatures, leaves: tuple[Tensor, ...]) -> Schedule:
        for entry, runs in mailbox.places.items():
            # No rows stand for no gradient: what took no part in the loss keeps None, as it would in one process.
            gradients = [leaf.detach()[:0] if leaf.grad is None else _rows(leaf.grad, runs) for leaf in leaves]
            while not self._put(step, entry, gradients):
                yield "room for gradients in the pool"

    def _put(self, step: Step, entry: int, gradients: list[Tensor]) -> bool:
        reader = self._encoder_ranks[step.plan.entries[entry].encoder_rank]
        with self._desk.timeline.span(BACKBONE, COMMUNICATION, "gradients", step.place):
            # An encoder that trains never works ahead, so that part is free for gradients. Were they to share one with
            # features, two ranks with both lanes could each fill it with what the other must read first.
            return self._desk.pool.put(step.gradient_key(entry), gradients, [reader], ahead=True) is not None

    def _fetch(self, mailbox: MicrobatchFeatures) -> bool:
        arrived = self._desk.pool.arrived(mailbox.missing)
        if arrived:
            with self._desk.timeline.span(BACKBONE, COMMUNICATION, "features", mailbox.step.place):
                mailbox.fetch(arrived, self._desk)
        return bool(arrived)


class MicrobatchFeatures:
    """The features of one microbatch, gathered from their entries as they arrive.

    Attributes:
        step: the step.
        places: entry number -> the runs of rows of the microbatch's features in which its rows belong.
        missing: key of an entry that is not here yet -> its number.
    """

    def __init__(self, step: Step, entries: list[int]) -> None:
        self.step = step
        self.places: dict[int, list[slice]] = {}
        self.missing = {step.feature_key(entry): entry for entry in entries}
        self._rows = 0
        self._tensors: tuple[Tensor, ...] = ()
        if entries:
            self._rows, places = feature_places(step.plan, [step.plan.entries[entry] for entry in entries])
            self.places = dict(zip(entries, places, strict=True))

    @property
    def is_full(self) -> bool:
        """All features are here."""
        return not self.missing

    def fetch(self, arrived: list[Key], desk: LaneContext) -> None:
        """Copies entries that have arrived and gives their room back at once."""
        for key in arrived:
            lease = desk.pool.get(key)
            assert lease is not None, "it has arrived"
            if not self._tensors:
                device = desk.compute.device
                self._tensors = tuple(
                    torch.empty((self._rows, *part.shape[1:]), dtype=part.dtype, device=device)
                    for part in lease.tensors
                )
            runs = self.places[self.missing.pop(key)]
            for whole, part in zip(self._tensors, lease.tensors, strict=True):
                for run, rows in zip(runs, torch.split(part, [run.stop - run.start for run in runs]), strict=True):
                    whole[run] = rows
            lease.release()

    def leaves(self, trains: bool) -> tuple[Tensor, ...]:
        """The features as leaves of the backbone's graph; ``()`` where the microbatch has no media."""
        return tuple(t.requires_grad_(trains and t.is_floating_point()) for t in self._tensors)


def _rows(gradient: Tensor, runs: list[slice]) -> Tensor:
    if len(runs) == 1:
        return gradient[runs[0]]
    return torch.cat([gradient[run] for run in runs])
