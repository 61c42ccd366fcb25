"""What no packing can avoid: idle time, and the least time of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.cost_model import CostModel
from flowtrain_lightning.packing.offline import OfflinePlan, OfflineSettings, cost_of_media
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray
from flowtrain_lightning.packing.step_work import FORWARD_SHARE

_SHARES = np.linspace(0, 1, 200)
"""Shares of the samples at whose costs the levels of :func:`least_idle_share` lie."""


def bounds_of(
    plan: OfflinePlan, tokens: IntArray, media_start: IntArray, media_cost: FloatArray, settings: OfflineSettings
) -> dict[str, float]:
    """Percent by which any plan of these samples idles, and by which steps outlast the work of their busiest lane.

    The former with the same samples left over and the same padding; the latter, ``flow_bound``, however samples are
    swapped between these microbatches. It is known where ranks synchronise at every microbatch.

    Args:
        plan: the packing.
        tokens: ``[samples]`` tokens of each sequence.
        media_start: ``[samples + 1]`` the media items of sample ``i`` are ``media_start[i]:media_start[i + 1]``.
        media_cost: ``[media items]`` what encoding each costs, in the unit of ``settings.cost``.
        settings: how the plan was made.
    """
    costs = settings.cost.of_each(tokens)
    if settings.sync_every == "step":
        share = least_idle_share_of_ranks([costs[step.samples] for step in plan.steps], settings.ranks)
        return {"bound": 100 * share}
    encoder = cost_of_media(media_start, media_cost)
    least = work = 0.0
    for step in plan.steps:
        own, bins = step.samples, step.positions * settings.ranks
        loads: FloatArray = np.bincount(step.bin_of, costs[own], minlength=bins).astype(np.float64)
        grid = loads.reshape(step.positions, settings.ranks)
        least += least_step_time(grid, costs[own], encoder[own], encoder_ranks=settings.encoder_ranks)
        encoding = (sum(float(media_cost[batch].sum()) for batch in of_rank) for of_rank in step.encoder_batches)
        work += max(float(grid.max(axis=1).sum()), *encoding)
    return {"bound": 100 * _idle_share(plan, tokens, settings), "flow_bound": 100 * max(0.0, least / work - 1)}


def _idle_share(plan: OfflinePlan, tokens: IntArray, settings: OfflineSettings) -> float:
    packed = np.sort(np.concatenate([step.samples for step in plan.steps]))
    if settings.global_batch_size is not None:
        step_of, reach = np.arange(len(packed)) // settings.global_batch_size, 0
    else:
        bins = sum(step.positions for step in plan.steps) * settings.ranks
        ahead = np.cumsum(tokens[packed]) - tokens[packed]
        step_of = np.floor(ahead / (tokens[packed].sum() / bins * (settings.microbatches or 1) * settings.ranks))
        reach = settings.max_delay + min(settings.lookahead, settings.max_delay)
    return least_idle_share(
        tokens[packed],
        step_of.astype(np.float64),
        settings.cost,
        group_size=settings.ranks,
        budget=settings.token_budget,
        reach=reach,
    )


def least_idle_share(
    tokens: IntArray, step: FloatArray, cost: CostModel, *, group_size: int, budget: int, reach: int
) -> float:
    """A lower bound on the idle share of ranks that synchronise at every microbatch.

    A balance group in which one microbatch costs ``x`` idles wherever its other microbatches cannot cost ``x``. What a
    microbatch may cost follows from its longest sample: filled with as many like it as fit, and one that fills the
    rest. So above every level ``x`` the bound counts groups that must exist (samples costlier than ``x`` that are too
    far apart in the stream to share one) and the microbatches of these groups for which no sample near enough is long
    enough.

    Args:
        tokens: ``[samples]`` in the order in which they are drawn.
        step: ``[samples]`` the step whose share of the stream each sample is in; never falling.
        cost: what a packed set of sequences costs.
        group_size: microbatches of a group, that is ranks.
        budget: the most tokens of a microbatch.
        reach: steps by which two samples of one group may be apart in the stream (longest wait and look-ahead).

    Returns:
        idle time / (idle time + computing time), from 0 to 1.
    """
    costs = cost.of_each(tokens)
    exact = tokens.astype(np.float64)
    alike = np.floor(budget / exact)
    most = cost.linear * budget + cost.quadratic * (alike * exact**2 + (budget - alike * exact) ** 2)
    # Below what the shortest samples alone can make of a microbatch, none falls short.
    lowest = float(most.min())
    if not (costs > lowest).any():
        return 0.0
    levels = np.concatenate([np.quantile(values[values > lowest], _SHARES) for values in (costs, most)])
    levels = np.unique(np.append(levels[levels <= costs.max()], lowest))
    when = (step - step[0]).astype(np.int64)
    idle = 0.0
    for lower, upper in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        costly, long = when[costs >= upper], when[most > lower]
        near = _least_missing(costly, np.cumsum(np.bincount(long, minlength=when[-1] + 1)), group_size, reach)
        anywhere = _fewest_groups(costly, reach, group_size) * group_size - len(long)
        idle += max(near, anywhere) * (upper - lower)
    return idle / (idle + float(costs.sum()))


def least_idle_share_of_ranks(costs: Sequence[FloatArray], ranks: int) -> float:
    """A lower bound on the idle share of ranks that synchronise once a step.

    Args:
        costs: for each step, ``[samples]`` what each costs.
        ranks: number of ranks.
    """
    total = sum(float(of_step.sum()) for of_step in costs)
    time = sum(max(float(of_step.sum()) / ranks, float(of_step.max(initial=0.0))) for of_step in costs)
    return 1 - total / ranks / time if time else 0.0


@compiled
def _least_missing(costly: IntArray, long: IntArray, group_size: int, reach: int) -> int:
    """Microbatches that stay below a level in the groups that hold ``costly``, wherever in the stream these are made.

    A group holds samples of ``reach + 1`` steps. Groups are chosen one after another, the next so that it takes in the
    first of ``costly`` that no group before it did; two that overlap share the long samples of their common steps.

    Args:
        costly: ``[n]`` the steps of samples that must be in one of the groups, never falling.
        long: ``[steps]`` long samples, one of which every microbatch that reaches the level needs, up to each step.
        group_size: microbatches of a group.
        reach: the most steps between two samples of a group.
    """
    steps = len(long)
    too_many = group_size * (len(costly) + 1)
    missing = np.full(steps, too_many, dtype=np.int64)  # by the last step of the last group so far
    least = too_many
    for last in range(-1, steps):
        so_far, used, following = 0, 0, 0
        if last >= 0:
            so_far = missing[last]
            if so_far == too_many:
                continue
            before = long[last - reach - 1] if last > reach else 0
            used = min(long[last], before + group_size)
            following = int(np.searchsorted(costly, last, side="right"))
        if following == len(costly):
            least = min(least, so_far)
            continue
        first = costly[following]
        for end in range(first, min(first + reach + 1, steps)):
            before = max(used, long[end - reach - 1] if end > reach else 0)
            lacking = group_size - min(group_size, long[end] - before)
            missing[end] = min(missing[end], so_far + lacking)
    return least


def _fewest_groups(steps: IntArray, reach: int, group_size: int) -> int:
    """Groups without which samples at ``steps`` cannot each have a microbatch of their own."""
    groups, members, first = 0, group_size, 0
    for step in steps.tolist():
        if members == group_size or step - first > reach:
            groups, members, first = groups + 1, 0, step
        members += 1
    return groups


def least_step_time(positions: FloatArray, costs: FloatArray, encoder: FloatArray, *, encoder_ranks: int) -> float:
    """A lower bound on the time that the simulator finds for a step, whatever each of its positions reads.

    It holds for ranks that synchronise at every microbatch, an encoder that trains on ranks of its own, and no limit on
    kept activations. Assumed in favour of the step: media items may be cut at will, and are dealt evenly to the encoder
    ranks. Then a linear program knows that a position begins when the forwards for all positions up to it are done;
    that the backwards for all positions from one on come after its end; and that any positions together read no less
    media than the samples poorest in media that cost as much.

    Args:
        positions: ``[positions, ranks]`` backbone cost of each microbatch, in order.
        costs: ``[samples]`` backbone cost of each sample of the step.
        encoder: ``[samples]`` encoder cost of each, forward and backward, in the unit of ``costs``.
        encoder_ranks: ranks that share the encoder cost.

    Returns:
        the time in the unit of cost.
    """
    # Slow to import, and packing itself asks for no bound.
    from scipy.optimize import linprog

    count, longest, totals = len(positions), positions.max(axis=1), positions.sum(axis=1)
    media = float(encoder.sum()) / encoder_ranks
    poorest = np.argsort(encoder / np.maximum(costs, 1e-300), kind="stable")
    cost_up_to = np.concatenate([[0.0], np.cumsum(costs[poorest])])
    media_up_to = np.concatenate([[0.0], np.cumsum(encoder[poorest])]) / encoder_ranks
    # Unknown are the beginning of each position, the media that each reads, and the end of the step.
    begin, reads, end = np.arange(count), count + np.arange(count), 2 * count
    lines: list[FloatArray] = []
    limits: list[float] = []

    def at_most(limit: float, *terms: tuple[IntArray | int, float]) -> None:
        line = np.zeros(2 * count + 1)
        for unknowns, factor in terms:
            line[unknowns] += factor
        lines.append(line)
        limits.append(limit)

    for position in range(count):
        at_most(0.0, (reads[: position + 1], FORWARD_SHARE), (int(begin[position]), -1.0))
        at_most(-longest[position], (int(begin[position]), 1.0), (reads[position:], 1 - FORWARD_SHARE), (end, -1.0))
        if position:
            at_most(-longest[position - 1], (int(begin[position - 1]), 1.0), (int(begin[position]), -1.0))
        for after in range(position, count + 1):
            outside = np.r_[:position, after:count]
            if len(outside):
                held = float(np.interp(totals[outside].sum(), cost_up_to, media_up_to))
                at_most(-held, (reads[outside], -1.0))
    answer = linprog(
        np.eye(2 * count + 1)[end],
        A_ub=np.array(lines),
        b_ub=np.array(limits),
        A_eq=[np.repeat([0.0, 1.0, 0.0], [count, count, 1])],
        b_eq=[media],
        method="highs",
    )
    return max(float(answer.fun), media) if answer.status == 0 else max(float(longest.sum()), media)
