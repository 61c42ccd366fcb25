"""A step's work for every role: tokens and media items by length, and how they may be batched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from math import log
from statistics import NormalDist
from typing import Any

import numpy as np

from flowtrain_lightning.allocator.description import ModuleDescription
from flowtrain_lightning.allocator.flops import FloatArray, IntArray
from flowtrain_lightning.allocator.role_layout import PlanningError
from flowtrain_lightning.packing.bin_packing import best_fit
from flowtrain_lightning.packing.encoder_batches import ENCODER_BUDGET
from flowtrain_lightning.packing.policies.trunk_order import MOST_OPEN
from flowtrain_lightning.packing.role_graph import BACKBONE
from flowtrain_lightning.packing.sample_stream import StreamSettings
from flowtrain_lightning.packing.shared_media import encoded_parts
from flowtrain_lightning.packing.step_plan import BoolArray

LOSS_CHUNK = 1024
"""Tokens of a chunk where nothing else is said."""

ENCODER_BATCHES_IN_FLIGHT = 4
"""Batches whose activations an encoder that trains keeps: the strategy's default for ``encoder_activations``.

Ranks with both roles keep as many on several devices, since they encode ahead for each other; a lone one keeps what a
microbatch reads.
"""


PACKED = 512
"""Items that are packed to see how far samples fill a forward; of more, every so many-th."""


_FEW = 8
"""Samples of a microbatch above which they fill it."""


@dataclass(frozen=True)
class Workload:
    """Samples drawn from the data, and how steps are made of such.

    Attributes:
        tokens: ``[samples]`` backbone tokens of each drawn sample, media tokens included.
        media: modality -> ``[items]`` encoder tokens (patches, frames) of each media item in the drawn samples; of what
            is generated, the generator's.
        content: modality -> ``[items]`` equal numbers for equal media items, of which a step encodes one; -1 where that
            is not known. Without the modalities of which nothing is known.
        together: samples that share a media item come in one step.
        global_batch_size: samples of a step; on average, where a step has ``microbatches``.
        token_budget: the most tokens of a backbone microbatch.
        encoder_budget: the most encoder tokens of an encoder batch.
        encoder_activations: batches of which an encoder that trains keeps the activations.
        loss_chunk: tokens whose logits exist at the same time, as the loss of the models of Hugging Face takes them
            (`flowtrain_lightning.models`); None is the microbatch.
        microbatches: of a step over all ranks, which it fills with as many samples as that takes; None makes steps of
            ``global_batch_size`` samples.

    Raises:
        PlanningError: no samples, or a number below 1.
    """

    tokens: IntArray
    media: Mapping[str, IntArray]
    global_batch_size: int = 256
    token_budget: int = 8192
    encoder_budget: int = ENCODER_BUDGET
    loss_chunk: int | None = LOSS_CHUNK
    microbatches: int | None = None
    content: Mapping[str, IntArray] = field(default_factory=dict)
    together: bool = False
    encoder_activations: int = ENCODER_BATCHES_IN_FLIGHT

    def __post_init__(self) -> None:
        sizes = ("global_batch_size", "token_budget", "encoder_budget", "loss_chunk", "microbatches")
        for name in (*sizes, "encoder_activations"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise PlanningError(f"The {name} is {getattr(self, name)}; it must be at least 1.")
        if not len(self.tokens) or self.tokens.min() < 1:
            raise PlanningError("The data must have samples, each of at least one token.")
        if (longest := int(self.tokens.max())) > self.token_budget:
            raise PlanningError(
                f"The longest sample has {longest:,} tokens, but a microbatch takes {self.token_budget:,}; raise the "
                "token budget or leave such samples out."
            )

    def filling(self, microbatches: int) -> Workload:
        """The same in steps that fill so many microbatches, as training makes them where nothing else is said."""
        each = StreamSettings.fill * self.token_budget / float(self.tokens.mean())
        if each < _FEW:  # of so long ones less finds room, as no sample is cut
            each = min(each, PACKED / filled_batches(self.tokens, PACKED, self.token_budget))
        return replace(self, microbatches=microbatches, global_batch_size=max(1, round(microbatches * each)))

    def encoded_parts(self, modality: str) -> FloatArray:
        """``[items]`` the part of each media item of a modality that is encoded, on average: see `encoded_parts`."""
        content, count = self.content.get(modality), len(self.media[modality])
        return encoded_parts(content, count, len(self.tokens), self.global_batch_size, together=self.together)

    @property
    def encoder_tokens(self) -> dict[str, float]:
        """Modality -> tokens of its encoder for each token of the backbone."""
        return {modality: float(lengths.sum() / self.tokens.sum()) for modality, lengths in self.media.items()}


def filled_batches(lengths: IntArray, count: int, budget: int) -> float:
    """Batches that so many items fill, as the packer counts them: within the budget, and no item is cut.

    Args:
        lengths: ``[items]`` of drawn items.
        count: how many are packed; of more than `PACKED` so many are, spread over all lengths.
        budget: the most tokens of a batch.
    """
    lengths = np.sort(lengths)[::-1].astype(np.int64)
    few = min(count, PACKED)
    drawn = np.ascontiguousarray(lengths[np.arange(few) * len(lengths) // few])
    batch, opened = best_fit(drawn, min(budget, int(drawn.sum())), few)
    if few == count or opened == 1:
        return opened * count / few
    filled = np.sort(np.bincount(batch, weights=drawn))[::-1]
    rest = filled[-1] / filled[:-1].mean()  # of the last one, which more items would fill
    return float((opened - 1 + min(1.0, rest)) * count / few)


@dataclass(frozen=True)
class RoleLoad:
    """One role's part of a step.

    Attributes:
        lengths: ``[items]`` tokens of each drawn sample or media item.
        items: samples or media items of a step.
        budget: the most tokens of one forward.
        batches_in_flight: batches whose activations may be kept at the same time, without a pipeline.
        fills_stages: it has as many forwards as its stages want; else as many as another role has, of which nothing is
            known here, and which may be as few as hold its items.
        loss_chunk: tokens whose logits exist at the same time; None is all of a forward.
        forwards: of a step that fills them; None is as many as its items need.
        batches_alone: as ``batches_in_flight``, in full ones, on a device that has all roles and is the only one: what
            the fullest microbatch reads. None is as many.
        batches_shared: that may be kept beside these, since later microbatches read them too.
    """

    lengths: IntArray
    items: float
    budget: int
    batches_in_flight: int
    loss_chunk: int | None = None
    forwards: int | None = None
    fills_stages: bool = True
    batches_alone: float | None = None
    batches_shared: int = 0

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return self.items * float(self.lengths.mean())


_MOST_MEDIA = 1.25
"""How many times the media of a mean microbatch those of the fullest one are taken to be."""


def typical_workload(module: ModuleDescription, **settings: Any) -> Workload:
    """Assumes a workload where nothing is known of the data: one media item a sample, lengths that are log-normal.

    Half of the samples have more than 1,200 tokens, half of the media items more than 1,024 tokens of the encoder; one
    in six is longer than twice that, one in six shorter than half.

    Args:
        module: its modalities.
        settings: further fields of `Workload`.
    """
    count = 509  # prime, so that any step through the quantiles pairs lengths of samples and media anew
    quantiles = [NormalDist(sigma=log(2)).inv_cdf((number + 0.5) / count) for number in range(count)]
    spread = np.exp(np.array(quantiles))
    media = {
        modality: np.rint(1024 * spread[np.arange(count) * step % count]).astype(np.int64)
        for modality, step in zip(module.modalities, cycle((197, 311, 89)), strict=False)
    }
    longest = max(1, settings.get("token_budget") or Workload.token_budget)
    return Workload(np.minimum(np.rint(1200 * spread).astype(np.int64), longest), media, **settings)


def role_loads(module: ModuleDescription, workload: Workload) -> dict[str, RoleLoad]:
    """Role -> its part of a step.

    Raises:
        PlanningError: the data say nothing about a modality that the module encodes.
    """
    size = workload.global_batch_size
    loads = {}
    for modality in module.modalities:
        half = module.roles[role := module.role_of(modality)]
        if modality not in workload.media:
            known, does = ", ".join(workload.media) or "none", "encodes" if modality in module.encoders else "generates"
            raise PlanningError(
                f"The module {does} {modality} media, but the data give no lengths of such; they give: {known}."
            )
        lengths = workload.media[modality]
        if not len(lengths) or lengths.min() < 1:
            raise PlanningError(
                f"The data must have {modality} media of at least one token, or its {role} has nothing to do."
            )
        items = size * len(lengths) / len(workload.tokens)
        shared = 0
        if modality in workload.content:
            parts = workload.encoded_parts(modality)
            shared = int(half.trains and not workload.together and parts.min() < 1)
            tokens = items * float((parts * lengths).mean())
            lengths = lengths[_first_of_each(workload.content[modality])]
            items = tokens / float(lengths.mean())
        in_flight = workload.encoder_activations if half.trains and modality in module.encoders else 1
        budget = max(workload.encoder_budget, int(lengths.max()))
        read = _MOST_MEDIA * workload.token_budget * workload.encoder_tokens[modality]
        alone = min(in_flight, max(read, float(lengths.max())) / budget)
        loads[role] = RoleLoad(
            lengths, items, budget, in_flight, fills_stages=False, batches_alone=alone, batches_shared=shared
        )
    budget, filled = workload.token_budget, workload.microbatches
    open_at_once = MOST_OPEN if module.generators else 1
    loads[BACKBONE] = RoleLoad(workload.tokens, size, budget, open_at_once, workload.loss_chunk, filled)
    return {role: loads[role] for role in module.roles}


def _first_of_each(content: IntArray) -> BoolArray:
    """``[items]`` whether a media item is the first with its content, or its content is not known."""
    first = content < 0
    first[np.unique(content, return_index=True)[1]] = True
    return first
