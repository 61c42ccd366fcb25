"""Steps of samples that are drawn from the lengths of data, and packed as the Trainer would pack them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from flowtrain_lightning.allocator import Allocation, Workload
from flowtrain_lightning.packing import DEFAULT_COST, CostModel, IntArray, SampleSizes, StepPlan
from flowtrain_lightning.packing.encoder_batches import ENCODER_BUDGET
from flowtrain_lightning.placement.simulation import plan_on

STEPS = 10
"""Steps that are simulated where nothing else is said."""


@dataclass(frozen=True)
class DrawnSteps:
    """Consecutive steps of samples, for any allocation.

    Attributes:
        sizes: of all samples that there are.
        chosen: ``[samples]`` of each step, as indices.
        token_budget: the most tokens of a microbatch.
        cost: by which microbatches are balanced.
        encoder_cost: by which encoder batches are, see `plan_step`.
        encoder_budget: the most patches of an encoder batch.
    """

    sizes: SampleSizes
    chosen: tuple[IntArray, ...]
    token_budget: int
    cost: CostModel = DEFAULT_COST
    encoder_cost: CostModel | None = None
    encoder_budget: int = ENCODER_BUDGET

    def packed(self, allocation: Allocation) -> list[StepPlan]:
        """The plan of every step on an allocation's ranks.

        Raises:
            PackingError: samples do not fit into microbatches.
        """
        packing = (self.token_budget, self.cost, self.encoder_cost, self.encoder_budget)
        return [plan_on(allocation, self.sizes.select(chosen), chosen, *packing) for chosen in self.chosen]

    def part(self, share: float, steps: int) -> DrawnSteps:
        """The first steps, of each of them one ``share``-th of the samples, and at least one."""
        return replace(self, chosen=tuple(chosen[: max(1, int(len(chosen) / share))] for chosen in self.chosen[:steps]))


def draw_steps(available: int, count: int, steps: int, seed: int) -> tuple[IntArray, ...]:
    """The samples of every step: all of them in an order that is drawn, and again in another one.

    Args:
        available: samples that there are, at least 1.
        count: samples of a step.
        steps: how many.
        seed: decides about the order.
    """

    def orders() -> Iterator[IntArray]:
        draw = np.random.default_rng(seed)
        for _ in range(-(-steps * count // available)):
            yield draw.permutation(available)

    order = np.concatenate([*orders()])
    return tuple(order[step * count : (step + 1) * count] for step in range(steps))


def sizes_of(workload: Workload) -> SampleSizes:
    """The samples of a workload in which each has one media item, or none has any.

    Nothing is said of target tokens and rows of features: all tokens, and a row for every patch, stand for them.

    Raises:
        ValueError: samples and media items are not as many, so that nobody knows whose is whose.
    """
    tokens = workload.tokens
    patches = next(iter(workload.media.values()), np.empty(0, dtype=np.int64))
    if len(patches) not in (0, len(tokens)) or len(workload.media) > 1:
        raise ValueError(f"{len(tokens)} samples have {len(patches)} media items; nothing says which has which.")
    start = np.arange(len(tokens) + 1) * (len(patches) > 0)
    return SampleSizes(tokens, tokens, start, patches, patches)
