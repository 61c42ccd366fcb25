"""Chooses the microbatches that a profile times: real samples, in sets of different sizes and lengths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data import FlowDataModule, PackedBatch, PackedMedia, RankShard, StepBatch
from flowtrain_lightning.data.steps.sampler import Sampling
from flowtrain_lightning.packing import IntArray, SampleSizes
from flowtrain_lightning.packing.role_graph import RoleGraph
from flowtrain_lightning.packing.step_members import TWO_ROLES

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
    """One microbatch, the encoder batches that it reads, and what is generated from it.

    Attributes:
        batch: a step, packed as for one rank that does everything.
        number: which microbatch of it.
        graph: the roles of the module.
    """

    batch: StepBatch
    number: int
    graph: RoleGraph = TWO_ROLES

    @property
    def packed(self) -> PackedBatch:
        """The microbatch."""
        found = self.batch.microbatches[self.number]
        assert found is not None
        return found

    @cached_property
    def media(self) -> dict[str, PackedMedia]:
        """Role -> what it encodes or generates; without roles for which no sample has media."""
        read = (media for _, media in self.batch.read_by(self.number))
        return {self.graph.taker_of(media.modality): media for media in read}

    def lengths(self, role: str) -> IntArray:
        """Tokens of every sequence for the trunk, patches of every media item for another role."""
        plan = self.batch.plan
        if role == self.graph.trunk:
            return plan.sizes.tokens[plan.microbatches[0][self.number]]
        batches = plan.batches[plan.graph.producers[0]][0]  # one rank that does everything has one role for all media
        read = self.batch.read_by(self.number)
        own = [batches[number] for number, media in read if self.graph.taker_of(media.modality) == role]
        return np.concatenate([np.empty(0, np.int64), *(plan.sizes.media_patches[media] for media in own)])


def load_probes(data: FlowDataModule, graph: RoleGraph = TWO_ROLES) -> list[Probe]:
    """One microbatch of each chosen set; of a few samples that fill the budget the packer may make two.

    Args:
        data: whose training samples are taken.
        graph: the roles of the module.

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
        Probe(batch, number, graph)
        for batch in batches
        for number, packed in enumerate(batch.microbatches)
        if packed is not None
    ]


def choose_sets(sizes: SampleSizes, token_budget: int, draw: np.random.Generator) -> Iterator[IntArray]:
    """Sets that together tell what tokens, their squares and a forward itself cost: few long samples, many short ones.

    Some are of samples with media, of every modality.

    Args:
        sizes: of all samples; none above the budget.
        token_budget: the most tokens of a set.
        draw: decides about samples and their order.
    """
    anything = np.ones(len(sizes), dtype=bool)
    with_media = [_with(sizes, modality) for modality in sizes.modalities] if len(sizes.media_rows) else [anything]
    for share in _SHARES:
        limit = share * token_budget
        yield _filled(sizes.tokens, draw.permutation(len(sizes)), anything, limit)
        for those in with_media:
            yield _filled(sizes.tokens, draw.permutation(len(sizes)), those, limit)
        yield _filled(sizes.tokens, np.argsort(-sizes.tokens, kind="stable"), anything, limit)
        yield _filled(sizes.tokens, np.argsort(sizes.tokens, kind="stable"), anything, limit)


def _with(sizes: SampleSizes, modality: str) -> NDArray[np.bool_]:
    """``[samples]`` those with media of a modality."""
    found = np.zeros(len(sizes), dtype=bool)
    found[sizes.media_sample[sizes.of_modality(modality)]] = True
    return found


def _filled(tokens: IntArray, order: IntArray, allowed: NDArray[np.bool_], limit: float) -> IntArray:
    """As many samples in this order as the limit holds; the shortest that is allowed where it holds none."""
    fitting = order[allowed[order] & (tokens[order] <= limit)]
    if not len(fitting):
        among = np.flatnonzero(allowed)
        return among[[np.argmin(tokens[among])]]
    count = int(np.searchsorted(np.cumsum(tokens[fitting]), limit, side="right"))
    return fitting[: max(1, count)]
