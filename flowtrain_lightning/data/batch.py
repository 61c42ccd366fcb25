"""The batches of ranks: packed media, packed sequences, features, and one rank's shard of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowtrain_lightning.data.kept_rows import KeptRows
from flowtrain_lightning.packing import IntArray, StepPlan
from flowtrain_lightning.packing.role_graph import ROLES, RoleGraph, graph_of
from flowtrain_lightning.packing.step_graph import Meeting, any_binds

IGNORED_LABEL = -100
"""The label of a token that carries no loss, as in PyTorch's cross entropy."""

Features = dict[str, Tensor | tuple[Tensor, ...]]
"""Modality -> ``[rows, ...]`` features of a microbatch's media; a tuple of tensors where ``encode`` returns one."""


_TWO_ROLES = graph_of(ROLES)


@dataclass(frozen=True)
class RankShard:
    """The part of every step that one rank loads.

    Attributes:
        backbone_rank: the data-parallel rank within the backbone role, which tensor ranks have in common; None where
            the rank has no backbone lane.
        backbone_ranks: data-parallel ranks of the backbone role.
        encoder_members: the data-parallel rank within each encoder for which this rank works, counted over all
            encoders; ``()`` where it does not encode.
        encoder_ranks: data-parallel ranks of the encoder role, or of all of them.
        colocated_lanes: the encoder rank and the backbone rank of each process that has both; ``()`` where none has.
        encoder_nodes: the node of each encoder rank, so that media items are encoded near their readers; ``()`` where
            there is one node.
        backbone_nodes: the node of each backbone rank, likewise.
        local: every rank encodes just the media that it reads (plain Lightning).
        meets: role -> which of its ranks begin a pass together; each by itself where a role is missing.
        graph: the roles, and what flows between them.
        producers: role that encodes -> its data-parallel ranks, in the order in which ``encoder_members`` counts them;
            empty where there is one such role.
        producers_per_rank: for how many of them a rank works at most.
    """

    backbone_rank: int | None
    backbone_ranks: int
    encoder_members: tuple[int, ...]
    encoder_ranks: int
    colocated_lanes: tuple[tuple[int, int], ...] = ()
    encoder_nodes: tuple[int, ...] = ()
    backbone_nodes: tuple[int, ...] = ()
    local: bool = False
    meets: Mapping[str, Meeting] = field(default_factory=dict)
    graph: RoleGraph = _TWO_ROLES
    producers: Mapping[str, int] = field(default_factory=dict)
    producers_per_rank: int = 1

    def meeting(self, role: str) -> Meeting:
        """The ranks of a role that begin a pass together."""
        return self.meets.get(role, Meeting())

    @property
    def trunk(self) -> str:
        """The role that reads features and computes the loss."""
        return self.graph.trunk

    @property
    def encoded(self) -> tuple[tuple[str, int], ...]:
        """Modality and data-parallel ranks of each role that encodes; ``()`` where one takes whatever there is."""
        named = ((self.graph.modality_of(role), ranks) for role, ranks in self.producers.items())
        return tuple((modality, ranks) for modality, ranks in named if modality is not None)

    def members_of(self, producer: str) -> range:
        """The members of a role that encodes, counted over all such roles."""
        first = 0
        for role, ranks in self.producers.items():
            if role == producer:
                return range(first, first + ranks)
            first += ranks
        return range(self.encoder_ranks)

    @property
    def own_members(self) -> dict[str, int]:
        """Role of this rank -> the member of it to which the rank belongs, counted within the role."""
        encoding = ((self.role_of(member), member) for member in self.encoder_members)
        own = {role: member - self.members_of(role).start for role, member in encoding}
        return own if self.backbone_rank is None else {self.trunk: self.backbone_rank, **own}

    def batches_of(self, role: str, plan: StepPlan) -> tuple[tuple[tuple[IntArray, ...], ...], IntArray]:
        """``[member][number]`` the batches of a role in a step, and the length of each item that they hold.

        Lengths are the patches of media items, of the trunk's samples the tokens.
        """
        if role == self.trunk:
            return plan.microbatches, plan.sizes.tokens
        members = self.members_of(role)
        return plan.encoder_batches[members.start : members.stop], plan.sizes.media_patches

    def role_of(self, member: int) -> str:
        """The role for which a member encodes, counted over all such roles."""
        return next(role for role in self.graph.producers if member in self.members_of(role))

    @property
    def in_fixed_order(self) -> bool:
        """Ranks need each other in some pass, so that one of two lanes takes turns in a fixed order."""
        return any_binds(self.meets)

    @classmethod
    def plain(cls, rank: int, ranks: int) -> RankShard:
        """The shard of a rank in plain data parallelism, where each rank holds the whole module."""
        return cls(rank, ranks, (rank,), ranks, local=True)


class Clip(NamedTuple):
    """A video in time: moments that follow each other, each of a few frames.

    Attributes:
        moments: how many there are.
        frames: of one moment; the encoder takes them together.
        seconds: from one moment to the next.
    """

    moments: int
    frames: int
    seconds: float


@dataclass(frozen=True)
class PackedMedia:
    """Media items of one modality, packed for one encoder forward without padding.

    A modality is what one encoder takes: images and videos of one tower are of one modality, and may lie in one batch.

    Attributes:
        modality: for example ``"image"``.
        pixels: ``[patches, patch_dim]`` the media items one after another, each in its encoder's order: uint8 where
            ``normalisation`` is there, else what ``patches`` is. A patch of a video is as many of these rows as a
            moment has frames.
        cu_seqlens: ``[media items + 1]`` int32, where the patches of each media item begin and end; of a video, those
            of each of its moments.
        grid: ``[media items, 2]`` int64, patches along height and width. It stays on the host, where it steers what is
            computed: reading it from a device would wait for all that the device still has to do.
        max_seqlen: patches of the largest image or moment.
        rows: ``[media items]`` rows of features that the encoder must return for each media item, in order.
        sizes: ``[media items]`` height and width in pixels of each media item as it was in the data.
        inputs: what the module's ``prepare_media`` has worked out of the sizes; empty where nobody has asked it.
        normalisation: ``[3, patch_dim]`` float32: divisor, mean and deviation of each number of a patch; None where
            ``pixels`` are normalised already.
        clips: ``[media items]`` what each video is in time, None of an image; ``()`` where all are images.
        kept: of a batch whose features are kept, all its media items; the other fields are then those of the ones that
            have to be encoded, perhaps none.
    """

    modality: str
    pixels: Tensor
    cu_seqlens: Tensor
    grid: Tensor
    max_seqlen: int
    rows: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...] = ()
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    normalisation: Tensor | None = None
    clips: tuple[Clip | None, ...] = ()
    kept: KeptRows | None = None

    @cached_property
    def patches(self) -> Tensor:
        """``[patches, patch_dim]`` floats, made where the pixels lie: as uint8 they come to a device sooner."""
        if self.normalisation is None:
            return self.pixels
        divisor, mean, deviation = self.normalisation
        normal: Tensor = (self.pixels.float() / divisor - mean) / deviation
        return normal

    def to(self, device: torch.device, non_blocking: bool = False) -> PackedMedia:
        """The same media items on ``device``, all but ``grid``."""
        if self.pixels.device == device:
            return self

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return replace(
            self,
            pixels=move(self.pixels),
            cu_seqlens=move(self.cu_seqlens),
            normalisation=None if self.normalisation is None else move(self.normalisation),
            inputs={name: move(tensor) for name, tensor in self.inputs.items()},
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that move to a device."""
        given = (self.normalisation,) if self.normalisation is not None else ()
        return self.pixels, self.cu_seqlens, *given, *self.inputs.values()

    def with_patches(self, patches: Tensor) -> PackedMedia:
        """The same media items with other patches, for example in another precision."""
        return replace(self, pixels=patches, normalisation=None)

    def images(self, channels: int = 3) -> Tensor:
        """Whole images instead of patches, for encoders that take images of one size.

        Args:
            channels: of an image.

        Returns:
            ``[images, channels, height, width]``, in pixels.

        Raises:
            ValueError: the images differ in size.
        """
        if (self.grid != self.grid[0]).any():
            raise ValueError(
                "The images of an encoder batch differ in size and cannot be stacked. Give the data module "
                "images=ImageProcessor(fixed_size=(height, width), ...)."
            )
        high, wide = self.grid[0].tolist()
        merge = math.isqrt(high * wide // self.rows[0])
        side = math.isqrt(self.patches.shape[1] // channels)
        blocks = self.patches.view(-1, high // merge, wide // merge, merge, merge, channels, side, side)
        # dimensions: image, block down, block across, patch down, patch across, channel, pixel down, pixel across
        return blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, channels, high * side, wide * side)


@dataclass(frozen=True)
class PackedBatch:
    """One microbatch: its sequences one after another, without padding between them.

    Attributes:
        tokens: ``[tokens]`` int64 ids; where features go, the id is the media token's.
        labels: ``[tokens]`` int64, **already shifted**: the id that this token must predict, or ``IGNORED_LABEL``. The
            last token of a sequence is always ignored, so nothing crosses a boundary.
        position_ids: ``[tokens]`` int64, from 0 in every sequence.
        cu_seqlens: ``[sequences + 1]`` int32. Padding, if any, is one more sequence at the end, without labels.
        max_seqlen: tokens of the longest sequence.
        media_positions: modality -> ``[rows]`` int64: the index in ``tokens`` of every row of features, in the order in
            which ``merge`` gets them. A modality that does not occur is absent.
        samples: data set index of every sequence (padding not counted); ``()`` where all is padding.
        targets: ``[targets]`` int64, where in ``tokens`` the labels count, ascending.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    media_positions: dict[str, Tensor]
    samples: tuple[int, ...]
    targets: Tensor

    def slice_tokens(self, own: slice) -> PackedBatch:
        """Some of the tokens, with their labels, targets and positions; bounds and media positions stay those of all.

        The host waits for the device, since nobody else knows how many targets these tokens have.
        """
        ends = torch.searchsorted(self.targets, torch.tensor([own.start, own.stop], device=self.targets.device))
        first, last = ends.tolist()
        return replace(
            self,
            tokens=self.tokens[own],
            labels=self.labels[own],
            position_ids=self.position_ids[own],
            targets=self.targets[first:last] - own.start,
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> PackedBatch:
        """The same microbatch on ``device``."""
        if self.tokens.device == device:
            return self

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return replace(
            self,
            tokens=move(self.tokens),
            labels=move(self.labels),
            position_ids=move(self.position_ids),
            cu_seqlens=move(self.cu_seqlens),
            media_positions={modality: move(positions) for modality, positions in self.media_positions.items()},
            targets=move(self.targets),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors."""
        own = self.tokens, self.labels, self.position_ids, self.cu_seqlens, self.targets
        return *own, *self.media_positions.values()


class StepBatch:
    """One rank's part of one step: one Lightning batch.

    A plain class and no dataclass, since Lightning would copy a dataclass field by field on its way to the device.

    Attributes:
        plan: the whole step's plan, equal on all ranks.
        shard: what of it this rank holds.
        microbatches: this rank's microbatches in order; None where one is empty. ``()`` without a backbone lane.
        encoder_batches: this rank's encoder batches in order, those of one encoder after another; None where one is
            empty. ``()`` where it does not encode.
        padding_media: role -> what this rank encodes for it, for nothing, where only others have an encoder batch: the
            smallest media item of the step that the role encodes. Without roles that have no need.
        epoch: the epoch of the step.
        step: the step's number within its epoch.
        following: ``following(n)`` is the n-th next batch (from 1) of the same loader on this rank, or None past
            the end. Asking loads it early; it is still delivered in its turn. Only a frozen encoder may ask.
        program: what whoever runs the step has worked out from it while it was loaded: the result of the loader's
            ``prepare``, or None.
    """

    __slots__ = (
        "encoder_batches",
        "epoch",
        "following",
        "microbatches",
        "padding_media",
        "plan",
        "program",
        "shard",
        "step",
    )

    def __init__(
        self,
        plan: StepPlan,
        shard: RankShard,
        microbatches: tuple[PackedBatch | None, ...],
        encoder_batches: tuple[PackedMedia | None, ...],
        epoch: int,
        step: int,
        padding_media: Mapping[str, PackedMedia] | None = None,
        following: Callable[[int], StepBatch | None] = lambda _: None,
        program: Any = None,
    ) -> None:
        self.plan = plan
        self.shard = shard
        self.microbatches = microbatches
        self.encoder_batches = encoder_batches
        self.epoch = epoch
        self.step = step
        self.padding_media: Mapping[str, PackedMedia] = padding_media or {}
        self.following = following
        self.program = program

    def read_by(self, microbatch: int) -> list[tuple[int, PackedMedia]]:
        """The encoder batches that a microbatch reads, each with its number, of a shard that is ``local``."""
        (member,) = self.shard.encoder_members
        turns = self.plan.encoder_turns[member]
        return [
            (number, media)
            for number, ((position, _), media) in enumerate(zip(turns, self.encoder_batches, strict=True))
            if media is not None and position == microbatch
        ]

    def to(self, device: torch.device, non_blocking: bool = False) -> StepBatch:
        """The batch itself, unmoved: lanes move one microbatch or encoder batch at a time, when its turn comes."""
        return self
