"""Microbatches of a trunk in stages: as many as keep its stages busy, and all of the step alike in cost.

A stage waits for the one before and the one behind, so that in a pipeline a costly microbatch holds up all stages, and
not only the ranks at its position.
"""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.bin_packing import best_fit
from flowtrain_lightning.packing.cost_model import CostModel
from flowtrain_lightning.packing.load_balancing import rebalance
from flowtrain_lightning.packing.microbatches import (
    arrange,
    as_microbatches,
    balance_totals,
    pack_sorted,
    sort_into_groups,
)
from flowtrain_lightning.packing.sample_stream import StreamSettings, StreamStep
from flowtrain_lightning.packing.step_plan import Batches, FloatArray, IntArray, SyncEvery

_FILLED = 4
"""Microbatches of a member for each of its stages, if there are samples for them: stages wait for a sixth of a step at
most then. Stages that gather weights for each microbatch get one: each more of them is gathered for."""

_ALIKE = 1.1
"""Cost of a step's costliest position over that of its cheapest one, up to which their order follows from media."""


def wanted_microbatches(stages: int, sync_every: SyncEvery) -> int:
    """Microbatches of a member of so many stages, where it has as many samples; more where they do not fit."""
    return stages * (1 if stages == 1 or sync_every == "microbatch" else _FILLED)


def pack_for_stages(
    tokens: IntArray, *, ranks: int, stages: int, token_budget: int, cost: CostModel, sync_every: SyncEvery
) -> Batches:
    """Pack samples into microbatches and deal these to the members, see `pack_microbatches`.

    Args:
        tokens: ``[samples]`` tokens of each sample, none above ``token_budget``.
        ranks: members of the trunk.
        stages: of each.
        token_budget: the most tokens of one microbatch.
        cost: what a packed set of sequences costs.
        sync_every: how often members wait for each other.
    """
    order = np.argsort(-tokens, kind="stable")
    falling, costs = tokens[order], cost.weight_of_each(tokens[order])
    _, opened = best_fit(falling, token_budget, len(falling))
    positions = max(1, -(-opened // ranks), min(wanted_microbatches(stages, sync_every), len(tokens) // ranks))
    alike, _ = pack_sorted(falling, costs, positions * ranks, token_budget, "microbatch")  # as if all ran together
    found = np.empty(len(tokens), dtype=np.int64)
    found[order] = balance_totals(sort_into_groups(alike, costs, positions, ranks), costs, positions, ranks)
    return as_microbatches(found, positions, ranks)


def cheap_ends(microbatches: Batches, tokens: IntArray, cost: CostModel) -> Batches:
    """The microbatches with the cheapest positions first and last, where positions are unlike; else as they are.

    A pipeline fills with the first microbatch and drains with the last one, while most of its stages wait; and between
    neighbours that are alike stages wait little.

    Args:
        microbatches: ``[rank][position]`` -> sample numbers.
        tokens: ``[samples]`` of each.
        cost: what a packed set of sequences costs.
    """
    costs = cost.weight_of_each(tokens)
    loads = np.array([[costs[samples].sum() for samples in own] for own in microbatches]).max(axis=0)
    if loads.max() <= loads.min() * _ALIKE:
        return microbatches
    rising = np.argsort(loads, kind="stable").tolist()
    order = [*rising[::2], *reversed(rising[1::2])]
    return tuple(tuple(own[position] for position in order) for own in microbatches)


def arrange_step(
    step: StreamStep, settings: StreamSettings, cost: CostModel, ranks: int, sync_every: SyncEvery, stages: int = 1
) -> Batches:
    """The microbatches of a stream's step for the ranks of a layout, by `arrange`; every layout has the same samples.

    Args:
        step: of the stream.
        settings: how the stream is cut.
        cost: what a packed set of sequences costs.
        ranks: members of the trunk in this layout.
        sync_every: how often they wait for each other.
        stages: of each.
    """
    costs, budget = cost.weight_of_each(step.tokens), settings.token_budget
    bin_of, positions = arrange(
        step.tokens,
        costs,
        step.bin_of,
        microbatches=settings.microbatches,
        group_size=settings.balance_group,
        ranks=ranks,
        budget=budget,
        sync_every=sync_every,
    )
    if stages > 1:
        bin_of = _made_alike(bin_of, step.tokens, costs, positions, ranks, budget)
    return as_microbatches(bin_of, positions, ranks)


def _made_alike(
    bin_of: IntArray, tokens: IntArray, costs: FloatArray, positions: int, ranks: int, budget: int
) -> IntArray:
    """The microbatches of a step, as many as before, with samples moved and swapped until all are alike in cost.

    Args:
        bin_of: ``[samples]`` the microbatch of each, ``position * ranks + rank``.
        tokens: ``[samples]`` of each.
        costs: ``[samples]`` of each.
        positions: microbatches of a member.
        ranks: members of the trunk.
        budget: the most tokens of a microbatch.
    """
    order = np.argsort(-tokens, kind="stable")
    found = bin_of[order].copy()
    rebalance(found, tokens[order], costs[order], 1, positions * ranks, budget)
    arranged = np.empty_like(bin_of)
    arranged[order] = balance_totals(found, costs[order], positions, ranks)
    return arranged
