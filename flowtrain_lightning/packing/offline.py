"""A whole data set packed at once: for trainers that read a plan, and to see how good a packing is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from flowtrain_lightning.packing.cost_model import CostModel
from flowtrain_lightning.packing.encoder_batches import pack_encoder_batches
from flowtrain_lightning.packing.microbatches import arrange, pack_sorted
from flowtrain_lightning.packing.order import order_step
from flowtrain_lightning.packing.sample_stream import StreamSettings, usual_balance_group
from flowtrain_lightning.packing.shared_media import costs_once, encoded_as
from flowtrain_lightning.packing.step_plan import (
    SYNC_EVERY,
    Batches,
    FloatArray,
    IntArray,
    PackingError,
    SyncEvery,
)
from flowtrain_lightning.packing.stream_packer import StreamPacker


@dataclass(frozen=True)
class OfflineSettings:
    """Settings of packing: into steps of a number of microbatches, or of a number of samples.

    Attributes:
        token_budget: the most tokens of a microbatch.
        ranks: backbone ranks.
        cost: what a packed set of sequences costs the backbone.
        microbatches: of each rank and step; None with ``global_batch_size``.
        sync_every: how often ranks wait for each other.
        encoder_ranks: ranks that encode.
        global_batch_size: samples of a step, which come in order; None with ``microbatches``.
        balance_group: microbatches that are made alike in cost, with ``microbatches``; None takes about a quarter.
        max_delay: steps that a sample may wait, with ``microbatches``.
        lookahead: steps drawn ahead at most, with ``microbatches``.
    """

    token_budget: int
    ranks: int
    cost: CostModel
    microbatches: int | None = None
    sync_every: SyncEvery = "microbatch"
    encoder_ranks: int = 1
    global_batch_size: int | None = None
    balance_group: int | None = None
    max_delay: int = 8
    lookahead: int = 4

    def __post_init__(self) -> None:
        for name in ("token_budget", "ranks", "encoder_ranks", "microbatches", "global_batch_size", "balance_group"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PackingError(f"{name} is {value}; it must be at least 1.")
        if self.sync_every not in SYNC_EVERY:
            raise PackingError(f"sync_every is {self.sync_every!r}; choose {' or '.join(map(repr, SYNC_EVERY))}.")
        if (self.microbatches is None) == (self.global_batch_size is None):
            raise PackingError(
                f"microbatches is {self.microbatches} and global_batch_size is {self.global_batch_size}; a step is a "
                "number of microbatches of each rank or a number of samples, so set one of them."
            )


@dataclass(frozen=True)
class PackedStep:
    """One step of a plan.

    Attributes:
        samples: ``[n]`` sample numbers, rising.
        bin_of: ``[n]`` the microbatch of each, ``position * ranks + rank``.
        positions: microbatches of each rank.
        delay: ``[n]`` steps that each waited.
        encoder_batches: ``[encoder rank][number]`` -> media item numbers, counted over the data set.
        encoded_as: media item -> the one of the step that is encoded in its place, since it is the same; without those
            that are encoded.
    """

    samples: IntArray
    bin_of: IntArray
    positions: int
    delay: IntArray
    encoder_batches: Batches = ()
    encoded_as: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OfflinePlan:
    """All steps, and what is known of them.

    Attributes:
        steps: in order.
        left: samples that no step took.
        seconds: time that packing took.
    """

    steps: tuple[PackedStep, ...]
    left: IntArray
    seconds: float


def pack_offline(
    tokens: IntArray,
    media_start: IntArray,
    media_cost: FloatArray,
    settings: OfflineSettings,
    media_content: IntArray | None = None,
) -> OfflinePlan:
    """Pack samples that come in sampler order.

    Args:
        tokens: ``[samples]`` tokens of each sequence, none above the budget.
        media_start: ``[samples + 1]`` the media items of sample ``i`` are ``media_start[i]:media_start[i + 1]``.
        media_cost: ``[media items]`` what encoding each costs, in the unit of ``settings.cost``.
        settings: how to pack.
        media_content: ``[media items]`` equal numbers for equal ones, of which a step encodes one; -1 where that is not
            known. None: no two are the same.

    Raises:
        PackingError: a sample is empty or over the budget, a cost is no number, or steps cannot be made so.
    """
    _refuse(tokens, media_cost, settings)
    begin = time.perf_counter()
    costs = settings.cost.weight_of_each(tokens)
    encoder_cost = cost_of_media(media_start, media_cost)
    if media_content is not None:
        media_content = np.where(media_content < 0, -1 - np.arange(len(media_content)), media_content)
    pack = _pack_tokens if settings.global_batch_size is None else _pack_samples
    drafts, left = pack(tokens, costs, settings)
    steps = []
    for draft in drafts:
        media, owner = _media_of(draft.samples, media_start)
        alike, encoding = None, encoder_cost[draft.samples]
        if media_content is not None:
            alike = media_content[media]
            once = costs_once(alike, media_cost[media])
            encoding = np.bincount(owner, once, minlength=len(draft.samples)).astype(np.float64)
        ordered = order_step(
            draft.bin_of,
            tokens[draft.samples],
            costs[draft.samples],
            encoding,
            positions=draft.positions,
            ranks=settings.ranks,
            encoder_ranks=settings.encoder_ranks,
            budget=settings.token_budget,
            sync_every=settings.sync_every,
        )
        batches, shared = _encode(media, ordered[owner], alike, media_cost, settings)
        steps.append(replace(draft, bin_of=ordered, encoder_batches=batches, encoded_as=shared))
    return OfflinePlan(tuple(steps), left, time.perf_counter() - begin)


def warm_up(settings: OfflineSettings) -> float:
    """Compile the inner loops, or load them compiled; the seconds it took, which are no time of packing."""
    begin = time.perf_counter()
    tiny = replace(
        settings,
        token_budget=64,
        microbatches=settings.microbatches and 2,
        global_batch_size=settings.global_batch_size and 32 * settings.ranks,
        balance_group=None,
        max_delay=8,
    )
    for tokens in (np.arange(320 * settings.ranks) % 7 + 1, np.arange(64 * settings.ranks) % 40 + 1):
        media_start = np.arange(len(tokens) + 1)
        pack_offline(tokens, media_start, np.ones(len(tokens)), tiny)
    return time.perf_counter() - begin


def cost_of_media(media_start: IntArray, media_cost: FloatArray) -> FloatArray:
    """``[samples]`` what encoding the media items of each sample costs."""
    up_to = np.concatenate([[0.0], np.cumsum(media_cost)])
    costs: FloatArray = up_to[media_start[1:]] - up_to[media_start[:-1]]
    return costs


def _pack_samples(tokens: IntArray, costs: FloatArray, settings: OfflineSettings) -> tuple[list[PackedStep], IntArray]:
    """Steps of a number of samples, before they are put in order, and the samples that fill none."""
    size = settings.global_batch_size or len(tokens)
    whole = len(tokens) // size * size
    drafts = []
    for start in range(0, whole, size):
        order = np.argsort(-tokens[start : start + size], kind="stable")
        found, positions = pack_sorted(
            tokens[start + order],
            costs[start + order],
            settings.ranks,
            settings.token_budget,
            settings.sync_every,
            settings.cost.constant,
        )
        bin_of = np.empty_like(found)
        bin_of[order] = found
        drafts.append(PackedStep(np.arange(start, start + size), bin_of, positions, np.zeros(size, dtype=np.int64)))
    return drafts, np.arange(whole, len(tokens))


def _pack_tokens(tokens: IntArray, costs: FloatArray, settings: OfflineSettings) -> tuple[list[PackedStep], IntArray]:
    """Steps of a number of microbatches, before they are put in order, and the samples that fill none."""
    assert settings.microbatches is not None
    stream = StreamPacker(
        StreamSettings(
            token_budget=settings.token_budget,
            microbatches=settings.microbatches * settings.ranks,
            balance_group=settings.balance_group or usual_balance_group(settings.microbatches * settings.ranks),
            cost=settings.cost,
            max_delay=settings.max_delay,
            lookahead=settings.lookahead,
        ),
        lambda start, end: tokens[start:end],
    )
    drafts = []
    for step in stream:
        bin_of, positions = arrange(
            step.tokens,
            costs[step.samples],
            step.bin_of,
            microbatches=stream.settings.microbatches,
            group_size=stream.settings.balance_group,
            ranks=settings.ranks,
            budget=settings.token_budget,
            sync_every=settings.sync_every,
        )
        drafts.append(PackedStep(step.samples, bin_of, positions, step.delay))
    return drafts, stream.left()


def _media_of(samples: IntArray, media_start: IntArray) -> tuple[IntArray, IntArray]:
    """The media items of some samples, counted over the data set, and which of these samples has each."""
    counts = media_start[samples + 1] - media_start[samples]
    owner = np.repeat(np.arange(len(samples)), counts)
    before = np.cumsum(counts) - counts
    return (media_start[samples] - before)[owner] + np.arange(counts.sum()), owner


def _encode(
    media: IntArray, reader: IntArray, alike: IntArray | None, media_cost: FloatArray, settings: OfflineSettings
) -> tuple[Batches, dict[int, int]]:
    """The encoder batches of a step, and which media items are encoded in the place of others.

    Args:
        media: ``[media items]`` of the step, counted over the data set.
        reader: ``[media items]`` the microbatch that reads each.
        alike: ``[media items]`` equal numbers for equal ones; None: no two are.
        media_cost: of all media items of the data set.
        settings: how to pack.
    """
    if not len(media):
        return tuple(() for _ in range(settings.encoder_ranks)), {}
    member, position = reader % settings.ranks, reader // settings.ranks
    everyone, each = np.arange(len(media)), np.ones(len(media), np.int64)
    source = encoded_as(alike, member, position, each, local=False)
    own = everyone if source is None else np.flatnonzero(source == everyone)
    batches = pack_encoder_batches(media_cost[media], member, position, own, members=settings.encoder_ranks)
    others = {} if source is None else {int(media[n]): int(media[source[n]]) for n in everyone if source[n] != n}
    return tuple(tuple(media[batch] for batch in of_rank) for of_rank in batches), others


def _refuse(tokens: IntArray, media_cost: FloatArray, settings: OfflineSettings) -> None:
    if len(tokens) and tokens.min() < 1:
        raise PackingError(f"Sample {int(np.argmin(tokens))} has {tokens.min()} tokens; every sample needs at least 1.")
    if len(tokens) and tokens.max() > settings.token_budget:
        first = int(np.argmax(tokens > settings.token_budget))
        raise PackingError(
            f"Sample {first} has {tokens[first]} tokens, more than the token budget of {settings.token_budget}; "
            "raise the budget, or drop or truncate such samples."
        )
    bad = np.flatnonzero(~(np.isfinite(media_cost) & (media_cost >= 0)))
    if len(bad):
        raise PackingError(
            f"The cost of media item {bad[0]} is {media_cost[bad[0]]}; every cost must be a finite number >= 0."
        )
