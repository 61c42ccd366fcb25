"""The next batch of a loader, taken from whoever loads it and prepared for its step, while the step before runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from flowtrain_lightning.data.batch import PackedMedia, StepBatch
from flowtrain_lightning.data.loading.workers import SharedMemoryBatch, fork_lock

Prepare = Callable[[StepBatch], object]
"""Works out what a step needs that follows from its plan, while the step before runs."""

PrepareMedia = Callable[[PackedMedia], Mapping[str, Tensor]]
"""Works out what an encoder needs that follows from the sizes of its media; see `FlowModule.prepare_media`."""


class Delivery(NamedTuple):
    """A batch on its way to whoever trains on it.

    Attributes:
        batch: the batch.
        stream: where the stream of samples stands once it was delivered; None where there is none.
        seconds: that a producer took to make it; None where none did.
    """

    batch: StepBatch
    stream: dict[str, Any] | None
    seconds: float | None


def next_batch(
    batches: Iterator[SharedMemoryBatch | None],
    prepare: Prepare | None,
    prepare_media: Callable[[PackedMedia | None], PackedMedia | None] | None,
) -> Delivery | None:
    """The next batch, prepared for its step; None at the end."""
    with fork_lock.loading():
        if (packed := next(batches, None)) is None:
            return None
        batch = packed.open()
        _ = batch.plan.entries  # computed here, not when the step begins
        if prepare_media is not None:
            batch.media = {role: tuple(map(prepare_media, own)) for role, own in batch.media.items()}
            prepared = {role: prepare_media(media) for role, media in batch.padding_media.items()}
            batch.padding_media = {role: media for role, media in prepared.items() if media is not None}
        if prepare is not None:
            batch.program = prepare(batch)
        return Delivery(batch, packed.stream, packed.seconds)


def with_inputs(prepare: PrepareMedia, pin_memory: bool, media: PackedMedia | None) -> PackedMedia | None:
    """An encoder batch with what ``prepare`` makes of the sizes of its media."""
    if media is None or not media.rows or media.items:  # nothing of what is generated is encoded
        return media
    inputs = prepare(media)
    return replace(media, inputs={name: one.pin_memory() for name, one in inputs.items()} if pin_memory else inputs)
