"""The features of one step on a rank that holds the whole module, where several microbatches read some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.compute.feature_spec import as_features
from flowtrain_lightning.data import Features, StepBatch
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.packing.batches_behind import generated_items
from flowtrain_lightning.packing.role_graph import RoleGraph


class _Encoded(NamedTuple):
    """An encoder batch whose features are there.

    Attributes:
        role: that encoded it.
        outputs: with their graph.
        read: what microbatches read: leaves, which gather the gradients of all of them.
    """

    role: str
    outputs: tuple[Tensor, ...]
    read: tuple[Tensor, ...]


class SharedFeatures:
    """Each encoder batch goes forward before the first microbatch that reads it, and backward after the last one.

    Args:
        compute: runs the user's methods.
        graph: of the module's roles.
        batch: the step.
        stream: number of an encoder batch -> that of its random stream.
    """

    def __init__(self, compute: Compute, graph: RoleGraph, batch: StepBatch, stream: Callable[[int], int]) -> None:
        self._compute = compute
        self._graph = graph
        self._batch = batch
        self._stream = stream
        (role,) = batch.shard.encodes
        member = batch.shard.own[role]
        self._until = batch.plan.read_until[role][member]
        self._encoded: dict[int, _Encoded] = {}
        self._rows: dict[int, tuple[int, slice]] = {}  # media item -> the encoder batch that has it, and where
        for number, media in enumerate(batch.plan.batches[role][member]):
            ends = np.cumsum(batch.plan.sizes.media_rows[media]).tolist()
            for item, first, end in zip(media.tolist(), [0, *ends], ends, strict=False):
                self._rows[item] = number, slice(first, end)

    def of(self, microbatch: int) -> Features:
        """The features that a microbatch reads, in the order of its media items."""
        batch = self._batch
        for number, media in batch.read_by(microbatch):
            if media.modality in self._graph.generated:
                continue
            role = self._graph.producer_of(media.modality)
            outputs = self._compute.encode(role, media, step=(batch.epoch, batch.step), number=self._stream(number))
            read = tuple(each.detach().requires_grad_() if each.requires_grad else each for each in outputs)
            self._encoded[number] = _Encoded(role, outputs, read)
        sizes, items = batch.plan.sizes, self._items(microbatch)
        features: Features = {}
        for modality in sorted({sizes.modality_of(item) for item in items.tolist()}):
            places = [self._rows[item] for item in items.tolist() if sizes.modality_of(item) == modality]
            parts = [[each[rows] for each in self._encoded[number].read] for number, rows in places]
            features |= as_features(modality, tuple(map(torch.cat, zip(*parts, strict=True))))
        return features

    def give_back(self, microbatch: int) -> None:
        """After a microbatch: the backward of all that no later one reads."""
        for number in [number for number in self._encoded if self._until[number] <= microbatch]:
            role, outputs, read = self._encoded.pop(number)
            gradients = tuple(each.grad for each in read)
            if any(gradient is not None for gradient in gradients):
                self._compute.backward(role, outputs, gradients, last=False)

    def _items(self, microbatch: int) -> IntArray:
        """The media items that are encoded for a microbatch, once for each time that a sample has them."""
        plan = self._batch.plan
        member, start = self._batch.shard.own[plan.graph.trunk], plan.sizes.media_start
        media = [np.arange(start[s], start[s + 1]) for s in plan.microbatches[member][microbatch]]
        own = np.concatenate([np.empty(0, np.int64), *media])
        own = own[~np.isin(own, generated_items(plan.sizes, self._graph))]
        return own if plan.encoded_as is None else plan.encoded_as[own]
