"""What ranks compute on: packed media, packed sequences, and the part of a step that one rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.packing import StepPlan

Features = dict[str, Tensor | tuple[Tensor, ...]]
"""Modality -> features, a tensor or a tuple of tensors with one row for each backbone token of the media."""

IGNORED_LABEL = -100
"""The label of a token that carries no loss, as in PyTorch's cross entropy."""


@dataclass(frozen=True)
class RankShard:
    """Which part of every step one rank loads.

    Attributes:
        backbone_rank: the rank within the backbone role, or None where the rank has no backbone lane.
        backbone_ranks: ranks of the backbone role.
        encoder_rank: the rank within the encoder role, or None where the rank has no encoder lane.
        encoder_ranks: ranks of the encoder role.
        colocated_encoder_ranks: for each backbone rank the encoder rank on the same rank, or -1; None where no rank
            plays both roles.
        local: every rank encodes just the media that it reads, one encoder batch per microbatch (plain Lightning).
    """

    backbone_rank: int | None
    backbone_ranks: int
    encoder_rank: int | None
    encoder_ranks: int
    colocated_encoder_ranks: tuple[int, ...] | None = None
    local: bool = False

    @classmethod
    def plain(cls, rank: int, ranks: int) -> RankShard:
        """The part of one rank of plain data parallelism, where each rank holds the whole module."""
        return cls(rank, ranks, rank, ranks, local=True)


@dataclass(frozen=True)
class PackedMedia:
    """Media of one modality, packed for one encoder forward without padding.

    Attributes:
        modality: for example ``"image"``.
        patches: ``[patches, patch_dim]`` floats; the media one after another, each in the order its encoder expects.
        cu_seqlens: ``[media + 1]`` int32, where each media's patches begin and end.
        grid: ``[media, 2]`` int64, rows and columns of patches.
        max_seqlen: patches of the largest media.
        rows: ``[media]`` rows of features that the encoder must return for each media, in order.
    """

    modality: str
    patches: Tensor
    cu_seqlens: Tensor
    grid: Tensor
    max_seqlen: int
    rows: tuple[int, ...]

    def to(self, device: torch.device, non_blocking: bool = False) -> PackedMedia:
        """The same media on ``device``."""
        move = _mover(device, non_blocking)
        return replace(self, patches=move(self.patches), cu_seqlens=move(self.cu_seqlens), grid=move(self.grid))

    def with_patches(self, patches: Tensor) -> PackedMedia:
        """The same media with other patches, for example in another precision."""
        return replace(self, patches=patches)

    def pictures(self, channels: int = 3) -> Tensor:
        """Whole pictures instead of patches, for encoders that take pictures of one size.

        Args:
            channels: of a picture.

        Returns:
            ``[media, channels, height, width]``, in pixels.

        Raises:
            ValueError: the media differ in size.
        """
        if (self.grid != self.grid[0]).any():
            raise ValueError(
                "The media of an encoder batch differ in size and cannot be stacked as pictures. Give the data module "
                "images=ImageProcessor(fixed_size=(height, width), ...)."
            )
        rows, columns = self.grid[0].tolist()
        merge = math.isqrt(rows * columns // self.rows[0])
        side = math.isqrt(self.patches.shape[1] // channels)
        blocks = self.patches.view(-1, rows // merge, columns // merge, merge, merge, channels, side, side)
        # -> media, channel, block row, row in block, pixel row, block column, column in block, pixel column
        return blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, channels, rows * side, columns * side)

    def pin_memory(self) -> PackedMedia:
        """The same media in page-locked memory."""
        return replace(
            self,
            patches=self.patches.pin_memory(),
            cu_seqlens=self.cu_seqlens.pin_memory(),
            grid=self.grid.pin_memory(),
        )


@dataclass(frozen=True)
class PackedBatch:
    """One microbatch: sequences one after another in a single row of tokens.

    Attributes:
        tokens: ``[tokens]`` int64 ids; a media's places hold the media token.
        labels: ``[tokens]`` int64, **already shifted**: the id that the token at this place must predict, or
            ``IGNORED_LABEL``. The last token of a sequence is always ignored, so nothing crosses a boundary.
        position_ids: ``[tokens]`` int64, from 0 in every sequence.
        cu_seqlens: ``[sequences + 1]`` int32. Padding, if any, is one more sequence at the end, without labels.
        max_seqlen: tokens of the longest sequence.
        media_positions: per modality, ``[rows]`` int64: the place in ``tokens`` of every row of features, in the
            order in which ``merge`` gets them. A modality that does not occur is absent.
        samples: data set index of every sequence (padding not counted).
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    media_positions: dict[str, Tensor]
    samples: tuple[int, ...]

    def to(self, device: torch.device, non_blocking: bool = False) -> PackedBatch:
        """The same microbatch on ``device``."""
        move = _mover(device, non_blocking)
        return replace(
            self,
            tokens=move(self.tokens),
            labels=move(self.labels),
            position_ids=move(self.position_ids),
            cu_seqlens=move(self.cu_seqlens),
            media_positions={name: move(places) for name, places in self.media_positions.items()},
        )

    def pin_memory(self) -> PackedBatch:
        """The same microbatch in page-locked memory."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
            cu_seqlens=self.cu_seqlens.pin_memory(),
            media_positions={name: places.pin_memory() for name, places in self.media_positions.items()},
        )


class StepBatch:
    """The part of one step that one rank holds: one Lightning batch.

    A plain class and no dataclass, since Lightning would copy a dataclass field by field on its way to the device.

    Attributes:
        plan: the whole step's plan, equal on all ranks.
        part: which part of it this rank holds.
        microbatches: this rank's microbatches in order; None where one is empty. ``()`` without a backbone lane.
        encoder_batches: this rank's encoder batches in order; None where one is empty. ``()`` without an encoder lane.
        epoch: the epoch of the step.
        step: the step's number within its epoch.
        following: ``following(n)`` is the n-th next batch (from 1) of the same loader on this rank, or None past
            the end. Asking loads it early; it is still delivered in its turn. Only a frozen encoder may ask.
        program: this rank's work in the step, where it was worked out ahead of it; None elsewhere.
    """

    __slots__ = ("encoder_batches", "epoch", "following", "microbatches", "part", "plan", "program", "step")

    def __init__(
        self,
        plan: StepPlan,
        part: RankShard,
        microbatches: tuple[PackedBatch | None, ...],
        encoder_batches: tuple[PackedMedia | None, ...],
        epoch: int,
        step: int,
        following: Callable[[int], StepBatch | None] = lambda _: None,
    ) -> None:
        self.plan = plan
        self.part = part
        self.microbatches = microbatches
        self.encoder_batches = encoder_batches
        self.epoch = epoch
        self.step = step
        self.following = following
        self.program: Any = None

    def to(self, device: torch.device, non_blocking: bool = False) -> StepBatch:
        """The same part, unmoved: lanes move one microbatch or encoder batch at a time, when its turn comes."""
        return self

    def pin_memory(self) -> StepBatch:
        """The same part in page-locked memory."""
        return StepBatch(
            self.plan,
            self.part,
            tuple(m and m.pin_memory() for m in self.microbatches),
            tuple(m and m.pin_memory() for m in self.encoder_batches),
            self.epoch,
            self.step,
            self.following,
        )


def _mover(device: torch.device, non_blocking: bool) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(device, non_blocking=non_blocking)
