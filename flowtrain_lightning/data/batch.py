"""The batches of ranks: packed media, packed sequences, features, and one rank's shard of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowtrain_lightning.data.features.kept_rows import KeptRows
from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.packing.role_graph import GENERATED
from flowtrain_lightning.packing.step_members import TWO_ROLES, StepMembers

IGNORED_LABEL = -100
"""The label of a token that carries no loss, as in PyTorch's cross entropy."""

Features = dict[str, Tensor | tuple[Tensor, ...]]
"""Modality -> ``[rows, ...]`` features of a microbatch's media; a tuple of tensors where ``encode`` returns one."""


@dataclass(frozen=True)
class RankShard:
    """The part of every step that one rank loads.

    Attributes:
        members: of all roles.
        own: role of this rank -> the member to which it belongs. Ranks of one member load the same.
        stages: role of this rank -> the stage whose layers it holds; without roles in one stage.
        slices: role of this rank -> which of the ranks it is that have some of its member's tokens each; without roles
            whose ranks have all.
    """

    members: StepMembers
    own: Mapping[str, int]
    stages: Mapping[str, int] = field(default_factory=dict)
    slices: Mapping[str, int] = field(default_factory=dict)

    @property
    def encodes(self) -> tuple[str, ...]:
        """The roles of this rank that encode."""
        return tuple(role for role in self.own if role in self.members.producers)

    @classmethod
    def plain(cls, rank: int, ranks: int) -> RankShard:
        """The shard of a rank in plain data parallelism, where each rank holds the whole module."""
        counts = dict.fromkeys(TWO_ROLES.roles, ranks)
        return cls(StepMembers(counts, local=True), dict.fromkeys(counts, rank))


class Clip(NamedTuple):
    """A video in time: moments that follow each other, each of a few frames.

    Attributes:
        moments: how many there are.
        frames: of one moment; the encoder takes them together.
        seconds: from one moment to the next.
        before: moments of the whole video that come before these, where it is in pieces.
        behind: those that come behind them.
    """

    moments: int
    frames: int
    seconds: float
    before: int = 0
    behind: int = 0

    def between(self, begin: int, end: int) -> Clip:
        """Some of these moments, from ``begin`` to before ``end``."""
        before, behind = self.before + begin, self.behind + self.moments - end
        return self._replace(moments=end - begin, before=before, behind=behind)


class Tiles(NamedTuple):
    """A picture in tiles that follow each other, all of one size.

    Attributes:
        number: how many there are.
        before: tiles of the whole picture that come before these, where it is in pieces.
        behind: those that come behind them.
    """

    number: int
    before: int = 0
    behind: int = 0

    def between(self, begin: int, end: int) -> Tiles:
        """Some of these tiles, from ``begin`` to before ``end``."""
        return Tiles(end - begin, self.before + begin, self.behind + self.number - end)


class GeneratedItem(NamedTuple):
    """A media item that is to be generated.

    Attributes:
        sample: place of its sample in the step.
        number: its own among the media items of the sample.
        condition_rows: rows of the backbone's outputs that it is generated from.
    """

    sample: int
    number: int
    condition_rows: int


@dataclass(frozen=True)
class PackedMedia:
    """Media items of one modality, packed for one encoder forward without padding.

    A modality is what one encoder takes: images and videos of one tower are of one modality, and may lie in one batch.

    Attributes:
        modality: for example ``"image"``.
        pixels: ``[patches, patch_dim]`` the media items one after another, each in its encoder's order: uint8 where
            ``normalisation`` is there, else what ``patches`` is. A patch of a video is as many of these rows as a
            moment has frames; one of audio is a frame of it.
        cu_seqlens: ``[media items + 1]`` int32, where the patches of each media item begin and end; of a video, those
            of each of its moments.
        grid: ``[media items, 2]`` int64, patches along height and width; of audio 1, and its frames. It stays on the
            host, where it steers what is computed: reading it from a device would wait for all that the device still
            has to do.
        max_seqlen: patches of the largest image or moment, or frames of the longest clip of audio.
        rows: ``[media items]`` rows of features that the encoder must return for each media item, in order.
        sizes: ``[media items]`` height and width in pixels of each media item as it was in the data; of audio samples,
            and how many a second.
        inputs: what the module's ``prepare_media`` has worked out of the sizes; empty where nobody has asked it.
        normalisation: ``[3, patch_dim]`` float32: divisor, mean and deviation of each number of a patch; None where
            ``pixels`` are normalised already.
        clips: ``[media items]`` what each video is in time, None of others; ``()`` where no item is a video.
        tiles: ``[media items]`` of pictures that are cut into tiles, None of others; ``()`` where there are none.
        kept: of a batch whose features are kept, all its media items; the other fields are then those of the ones that
            have to be encoded, perhaps none.
        items: ``[media items]`` of media that are to be generated, what each is in the step; ``()`` of others.
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
    tiles: tuple[Tiles | None, ...] = ()
    kept: KeptRows | None = None
    items: tuple[GeneratedItem, ...] = ()

    @cached_property
    def patches(self) -> Tensor:
        """``[patches, patch_dim]`` floats, made where the pixels lie: as uint8 they come to a device sooner."""
        if self.normalisation is None:
            return self.pixels
        divisor, mean, deviation = self.normalisation
        normal: Tensor = (self.pixels.float() / divisor - mean) / deviation
        return normal

    @property
    def patch_count(self) -> int:
        """The number of its patches, which the host knows."""
        moments = [1 if clip is None else clip.moments for clip in self.clips] or [1] * len(self.grid)
        return sum(math.prod(grid) * count for grid, count in zip(self.grid.tolist(), moments, strict=True))

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
        generated: media items that are to be generated from its outputs.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    media_positions: dict[str, Tensor]
    samples: tuple[int, ...]
    targets: Tensor
    generated: int = 0

    @property
    def condition_positions(self) -> Tensor:
        """``[rows]`` int64: where in ``tokens`` images that are to be generated have their places, item after item."""
        return self.media_positions.get(GENERATED, self.tokens.new_zeros(0))

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
        microbatches: this rank's microbatches in order; None where one is empty. ``()`` where it does not work for the
            trunk.
        media: role of this rank that encodes or generates -> its batches in order; None where one is empty.
        padding_media: role -> what this rank encodes for it, for nothing, where only others have an encoder batch: the
            smallest media item of the step that the role encodes, or its first part. Without roles that have
            no need.
        epoch: the epoch of the step.
        step: the step's number within its epoch.
        following: ``following(n)`` is the n-th next batch (from 1) of the same loader on this rank, or None past
            the end. Asking loads it early; it is still delivered in its turn. Only a frozen encoder may ask.
        program: what whoever runs the step has worked out from it while it was loaded: the result of the loader's
            ``prepare``, or None.
    """

    __slots__ = (
        "epoch",
        "following",
        "media",
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
        media: Mapping[str, tuple[PackedMedia | None, ...]],
        epoch: int,
        step: int,
        padding_media: Mapping[str, PackedMedia] | None = None,
        following: Callable[[int], StepBatch | None] = lambda _: None,
        program: Any = None,
    ) -> None:
        self.plan = plan
        self.shard = shard
        self.microbatches = microbatches
        self.media = media
        self.epoch = epoch
        self.step = step
        self.padding_media: Mapping[str, PackedMedia] = padding_media or {}
        self.following = following
        self.program = program

    def read_by(self, microbatch: int) -> list[tuple[int, PackedMedia]]:
        """The encoder batches that a microbatch reads, each with its number, of a shard that is ``local``."""
        (role,) = self.shard.encodes
        turns = self.plan.turns[role][self.shard.own[role]]
        return [
            (number, media)
            for number, ((position, _), media) in enumerate(zip(turns, self.media[role], strict=True))
            if media is not None and position == microbatch
        ]

    def to(self, device: torch.device, non_blocking: bool = False) -> StepBatch:
        """The batch itself, unmoved: lanes move one microbatch or encoder batch at a time, when its turn comes."""
        return self
