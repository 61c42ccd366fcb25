"""Steps of samples that are drawn from the lengths of data, and packed as the Trainer would pack them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np

from flowtrain_lightning.allocator import Allocation, Workload
from flowtrain_lightning.packing import DEFAULT_COST, CostModel, IntArray, SampleSizes, StepPlan
from flowtrain_lightning.packing.encoder_batches import ENCODER_BUDGET
from flowtrain_lightning.packing.listed_media import ListedMedia, sizes_of_listed
from flowtrain_lightning.packing.media_groups import MediaGroups
from flowtrain_lightning.packing.sample_stream import StreamSettings, StreamStep, usual_balance_group
from flowtrain_lightning.packing.stage_microbatches import arrange_step
from flowtrain_lightning.packing.step_planner import sync_every_of
from flowtrain_lightning.packing.stream_packer import StreamPacker
from flowtrain_lightning.placement.simulation import plan_on

_LEAST_STEPS, _MOST_STEPS = 10, 60
"""Steps that are simulated where nothing is said of them."""

_ENOUGH_SAMPLES = 512
"""Samples of all these steps together, as far as so many steps have them."""


@dataclass(frozen=True)
class DrawnSteps:
    """Consecutive steps of a number of samples, for any allocation.

    Attributes:
        sizes: of all samples that there are.
        chosen: ``[samples]`` of each step, as indices.
        token_budget: the most tokens of a microbatch.
        cost: by which microbatches are balanced.
        media_costs: by which batches of media items are, see `plan_step`.
        encoder_budget: the most patches of an encoder batch.
    """

    sizes: SampleSizes
    chosen: tuple[IntArray, ...]
    token_budget: int
    cost: CostModel = DEFAULT_COST
    media_costs: Mapping[str, CostModel] = field(default_factory=dict)
    encoder_budget: int = ENCODER_BUDGET

    def packed(self, allocation: Allocation) -> list[StepPlan]:
        """The plan of every step on an allocation's ranks.

        Raises:
            PackingError: samples do not fit into microbatches.
        """
        packing = (self.token_budget, self.cost, self.media_costs, self.encoder_budget)
        return [plan_on(allocation, self.sizes.select(chosen), chosen, *packing) for chosen in self.chosen]

    def part(self, share: float, steps: int) -> DrawnSteps:
        """The first steps, of each of them one ``share``-th of the samples, and at least one."""
        return replace(self, chosen=tuple(chosen[: max(1, int(len(chosen) / share))] for chosen in self.chosen[:steps]))


@dataclass(frozen=True)
class FilledSteps:
    """Consecutive steps that fill a number of microbatches, as training makes them, for any allocation.

    Attributes:
        sizes: of all samples that there are.
        settings: how a stream of them is cut into steps.
        count: how many steps.
        seed: decides about the order.
        media_costs: by which batches of media items are balanced, see `plan_step`.
        encoder_budget: the most patches of an encoder batch.
        groups: samples that come side by side; None: each by itself.
    """

    sizes: SampleSizes
    settings: StreamSettings
    count: int
    seed: int = 0
    media_costs: Mapping[str, CostModel] = field(default_factory=dict)
    encoder_budget: int = ENCODER_BUDGET
    groups: MediaGroups | None = None

    def packed(self, allocation: Allocation) -> list[StepPlan]:
        """The plan of every step on an allocation's ranks.

        Raises:
            PackingError: samples do not fit into microbatches.
        """
        return [self._packed(allocation, *drawn) for drawn in self._drawn]

    def part(self, share: float, steps: int) -> FilledSteps:
        """The first steps, of each of them one ``share``-th of the microbatches, and at least one."""
        microbatches = max(1, round(self.settings.microbatches / share))
        fewer = replace(self.settings, microbatches=microbatches, balance_group=usual_balance_group(microbatches))
        return replace(self, settings=fewer, count=min(steps, self.count))

    @cached_property
    def _drawn(self) -> list[tuple[StreamStep, IntArray]]:
        """Each step, and which of all samples are in it."""
        order = _EndlessOrder(len(self.sizes), self.seed, self.groups)
        packer = StreamPacker(self.settings, lambda start, end: self.sizes.tokens[order.between(start, end)])
        steps = list(islice(packer, self.count))
        return [(step, order.between(0, int(step.samples[-1]) + 1)[step.samples]) for step in steps]

    def _packed(self, allocation: Allocation, step: StreamStep, samples: IntArray) -> StepPlan:
        settings, members = self.settings, allocation.step_members()
        ranks = members.counts[members.trunk]
        made = arrange_step(step, settings, settings.cost, ranks, sync_every_of(members), members.pipeline.stages)
        packing = (settings.token_budget, settings.cost, self.media_costs, self.encoder_budget)
        return plan_on(allocation, self.sizes.select(samples), samples, *packing, microbatches=made)


class _EndlessOrder:
    """All samples in an order that is drawn, then in another one, and so on; see `MediaGroups.ordered` for ``step``."""

    def __init__(self, available: int, seed: int, groups: MediaGroups | None = None, step: int = 1) -> None:
        self._available, self._draw = available, np.random.default_rng(seed)
        self._groups, self._step = groups, step
        self._drawn = np.empty(0, dtype=np.int64)

    def between(self, start: int, end: int) -> IntArray:
        """``[end - start]`` the samples at these positions."""
        more = -(-(end - len(self._drawn)) // self._available)
        if more > 0:
            orders = [self._draw.permutation(self._available) for _ in range(more)]
            if self._groups is not None:
                orders = [self._groups.ordered(order, self._step) for order in orders]
            self._drawn = np.concatenate([self._drawn, *orders])
        return self._drawn[start:end]


def draw_steps(
    available: int, count: int, steps: int, seed: int, groups: MediaGroups | None = None
) -> tuple[IntArray, ...]:
    """The samples of every step: all of them in an order that is drawn, and again in another one.

    Args:
        available: samples that there are, at least 1.
        count: samples of a step.
        steps: how many.
        seed: decides about the order.
        groups: samples that come in one step; None: each by itself.
    """
    order = _EndlessOrder(available, seed, groups, count)
    return tuple(order.between(step * count, (step + 1) * count) for step in range(steps))


def steps_of(
    workload: Workload,
    sizes: SampleSizes,
    cost: CostModel = DEFAULT_COST,
    media_costs: Mapping[str, CostModel] | None = None,
    count: int | None = None,
    seed: int = 0,
) -> DrawnSteps | FilledSteps:
    """Steps as a workload says: of a number of samples, or of microbatches that these fill.

    Args:
        workload: the size of a step, and the budgets of its batches.
        sizes: of all samples that there are, at least 1.
        cost: by which microbatches are balanced.
        media_costs: by which batches of media items are; None: by patches.
        count: how many steps; None takes as many as tell what one takes on average: more of few samples, which differ.
        seed: decides about the order of the samples.
    """
    media_costs = media_costs or {}
    groups = MediaGroups.of_sizes(sizes) if workload.together else None
    if count is None:
        count = min(_MOST_STEPS, max(_LEAST_STEPS, -(-_ENOUGH_SAMPLES // workload.global_batch_size)))
    if (filled := workload.microbatches) is not None:
        group = usual_balance_group(filled)
        settings = StreamSettings(
            token_budget=workload.token_budget, microbatches=filled, balance_group=group, cost=cost
        )
        return FilledSteps(sizes, settings, count, seed, media_costs, workload.encoder_budget, groups)
    chosen = draw_steps(len(sizes), workload.global_batch_size, count, seed, groups)
    return DrawnSteps(sizes, chosen, workload.token_budget, cost, media_costs, workload.encoder_budget)


def sizes_of(workload: Workload) -> SampleSizes:
    """The samples of a workload in which each has one media item of every modality, or none has any.

    See `sizes_of_listed` for what a workload does not say.

    Raises:
        ValueError: samples and media items are not as many, so that nobody knows whose is whose.
    """
    samples, media = len(workload.tokens), {}
    for modality, patches in workload.media.items():
        if len(patches) not in (0, samples):
            raise ValueError(
                f"{samples} samples have {len(patches)} {modality} media items; nothing says which has which."
            )
        media[modality] = ListedMedia(np.arange(samples + 1) * (len(patches) > 0), patches)
    return sizes_of_listed(workload.tokens, media)
