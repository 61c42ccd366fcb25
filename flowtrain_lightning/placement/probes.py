"""Chooses the microbatches that a profile times: real samples, in sets of different sizes and lengths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data import FlowDataModule, PackedBatch, PackedMedia, RankShard, StepBatch
from flowtrain_lightning.data.sampler import Sampling
from flowtrain_lightning.packing import IntArray, SampleSizes

_SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""Shares of the token budget to which microbatches are filled."""
_POOL = 2048
"""Samples among which sets are chosen."""


@dataclass(frozen=True)
class ChosenSamples(Sampling):
    """Steps of given samples.

    Attributes:
        sets: the samples of each step.
    """

    sets: tuple[IntArray, ...] = ()

    def step(self, epoch: int, step: int) -> IntArray:
        """The samples of one step, in every epoch."""
        return self.sets[step]


@dataclass(frozen=True)
class Probe:
    """One microbatch, and the encoder batch that it reads.

    Attributes:
        batch: a step, packed as for one rank that does everything.
        number: which microbatch of it.
    """

    batch: StepBatch
    number: int

    @property
    def packed(self) -> PackedBatch:
        """The microbatch."""
        found = self.batch.microbatches[self.number]
        assert found is not None
        return found

    @property
    def media(self) -> PackedMedia | None:
        """The encoder batch; None where no sample has media."""
        return next((media for _, media in self.batch.read_by(self.number)), None)

    def lengths(self, role: str) -> IntArray:
        """Tokens of every sequence for the backbone, patches of every media item for the encoder."""
        plan = self.batch.plan
        batches, lengths = plan.batches[role][0], plan.lengths(role)
        own = [self.number] if role == plan.graph.trunk else [number for number, _ in self.batch.read_by(self.number)]
        return np.concatenate([np.empty(0, np.int64), *(lengths[batches[number]] for number in own)])


def load_probes(data: FlowDataModule) -> list[Probe]:
    """One microbatch of each chosen set; of a few samples that fill the budget the packer may make two.

    Raises:
        DataError: there are no training data, or they cannot be read.
    """
    loader = data.train_dataloader()
    source = loader.steps.samples.source
    draw = np.random.default_rng(data.seed)
    pool = np.sort(draw.permutation(len(source))[:_POOL])
    sets = tuple(pool[chosen] for chosen in choose_sets(source.sizes(pool), data.token_budget, draw))
    sampling, shard = ChosenSamples((len(source),), 1, sets=sets), RankShard.plain(0, 1)
    steps = replace(loader.steps, sampling=sampling, shard=shard, shares=False)
    # What a microbatch reads is one encoder batch here, whatever its patches: their number follows from its tokens.
    packing = replace(loader.steps.packing, encoder_budget=sys.maxsize)
    batches = [steps.load(0, number, packing) for number in range(len(sets))]
    return [
        Probe(batch, number)
        for batch in batches
        for number, packed in enumerate(batch.microbatches)
        if packed is not None
    ]


def choose_sets(sizes: SampleSizes, token_budget: int, draw: np.random.Generator) -> Iterator[IntArray]:
    """Sets that together tell what tokens, their squares and a forward itself cost: few long samples, many short ones.

    Args:
        sizes: of all samples; none above the budget.
        token_budget: the most tokens of a set.
        draw: decides about samples and their order.
    """
    anything = np.ones(len(sizes), dtype=bool)
    with_media = np.diff(sizes.media_start) > 0
    for share in _SHARES:
        limit = share * token_budget
        yield _filled(sizes.tokens, draw.permutation(len(sizes)), anything, limit)
        yield _filled(sizes.tokens, draw.permutation(len(sizes)), with_media if with_media.any() else anything, limit)
        yield _filled(sizes.tokens, np.argsort(-sizes.tokens, kind="stable"), anything, limit)
        yield _filled(sizes.tokens, np.argsort(sizes.tokens, kind="stable"), anything, limit)


def _filled(tokens: IntArray, order: IntArray, allowed: NDArray[np.bool_], limit: float) -> IntArray:
    """As many samples in this order as the limit holds; the shortest that is allowed where it holds none."""
    fitting = order[allowed[order] & (tokens[order] <= limit)]
    if not len(fitting):
        among = np.flatnonzero(allowed)
        return among[[np.argmin(tokens[among])]]
    count = int(np.searchsorted(np.cumsum(tokens[fitting]), limit, side="right"))
    return fitting[: max(1, count)]
