"""What is known of a plan made offline: every metric, and the least idle time that any plan could have."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.bound import idle_bound, rank_bound
from flowtrain_lightning.packing.context_parts import context_parts
from flowtrain_lightning.packing.evaluator import FORWARD_SHARE, EncoderWork, step_time
from flowtrain_lightning.packing.flow_bound import least_step_time
from flowtrain_lightning.packing.metrics import encoder_idle, measure
from flowtrain_lightning.packing.offline import OfflinePlan, OfflineSettings
from flowtrain_lightning.packing.plan import FloatArray, IntArray

_JUDGED_STEPS = 50
"""Steps that are simulated for ``flow_gap``, evenly chosen."""


def judge(
    plan: OfflinePlan, tokens: IntArray, media_start: IntArray, media_cost: FloatArray, settings: OfflineSettings
) -> dict[str, float]:
    """Every metric of a plan by name; idle figures and bounds in percent."""
    of_sample = np.concatenate([[0.0], np.cumsum(media_cost)])
    encoder_cost = of_sample[media_start[1:]] - of_sample[media_start[:-1]]
    costs = settings.cost.of_each(tokens)
    figures: dict[str, float] = {"steps": len(plan.steps), "samples_left": len(plan.left)}
    if plan.steps:
        positions = max(step.positions for step in plan.steps)
        shape = (len(plan.steps), positions, settings.ranks)
        grids = [np.zeros(shape) for _ in range(4)]
        for number, step in enumerate(plan.steps):
            for grid, weights in zip(grids, (costs, encoder_cost, tokens, np.ones(len(tokens))), strict=True):
                filled = np.bincount(step.bin_of, weights[step.samples], minlength=positions * settings.ranks)
                grid[number] = filled.reshape(positions, settings.ranks)
        figures |= measure(grids[0], grids[1], grids[2], grids[3], settings.token_budget).as_dict()
        used = sum(step.positions for step in plan.steps) * settings.ranks
        figures["pad"] = 100 * (1 - grids[2].sum() / (used * settings.token_budget))
        loads = np.array([[sum(media_cost[b].sum() for b in rank) for rank in s.encoder_batches] for s in plan.steps])
        figures["encoder_idle"] = encoder_idle(loads)
        delays = np.concatenate([step.delay for step in plan.steps])
        figures["max_delay_seen"] = int(delays.max())
        figures["p999_delay"] = float(np.quantile(delays, 0.999))
        figures["mean_delay"] = float(delays.mean())
        figures |= _flow(plan, costs, media_start, media_cost, settings)
        figures["samples_to_split"] = sum(
            int((context_parts(tokens[s.samples], settings.cost, microbatches=s.positions * settings.ranks) > 1).sum())
            for s in plan.steps
        )
        figures["bound"] = 100 * _bound(plan, tokens, figures["pad"] / 100, settings)
    figures["microseconds_per_sample"] = 1e6 * plan.seconds / max(1, len(tokens))
    return figures


def _bound(plan: OfflinePlan, tokens: IntArray, pad: float, settings: OfflineSettings) -> float:
    """The least idle share for these samples and settings, with the same samples left over and the same padding."""
    placed = np.sort(np.concatenate([step.samples for step in plan.steps]))
    if settings.sync_every == "step":
        return rank_bound([settings.cost.of_each(tokens[step.samples]) for step in plan.steps], settings.ranks)
    if settings.batch_unit == "samples":
        step_of = np.arange(len(placed)) // (settings.global_batch_size or 1)
        reach = 0
    else:
        bins = (settings.microbatches or 1) * settings.ranks
        ahead = np.cumsum(tokens[placed]) - tokens[placed]
        step_of = np.floor(ahead / (bins * settings.token_budget * (1 - pad)))
        reach = settings.max_delay + min(settings.lookahead, settings.max_delay)
    return idle_bound(
        tokens[placed],
        step_of.astype(np.float64),
        settings.cost,
        width=settings.ranks,
        budget=settings.token_budget,
        reach=reach,
    )


def _flow(
    plan: OfflinePlan, costs: FloatArray, media_start: IntArray, media_cost: FloatArray, settings: OfflineSettings
) -> dict[str, float]:
    """Percent by which steps are longer than the work of their busiest lane, with an encoder that trains.

    Where ranks meet at every microbatch, also the least that any exchange between these microbatches could reach.
    """
    makespan = work = least = 0.0
    owner = np.repeat(np.arange(len(media_start) - 1), np.diff(media_start))
    of_sample = np.concatenate([[0.0], np.cumsum(media_cost)])
    encoder = of_sample[media_start[1:]] - of_sample[media_start[:-1]]
    chosen = np.unique(np.linspace(0, len(plan.steps) - 1, _JUDGED_STEPS).astype(int))
    for step in (plan.steps[number] for number in chosen.tolist()):
        grid = np.zeros((step.positions, settings.ranks))
        np.add.at(grid.ravel(), step.bin_of, costs[step.samples])
        batches = []
        for of_rank in step.encoder_batches:
            works = []
            for batch in of_rank:
                bins = np.unique(step.bin_of[np.searchsorted(step.samples, owner[batch])])
                readers = tuple((int(b % settings.ranks), int(b // settings.ranks)) for b in bins)
                total = float(media_cost[batch].sum())
                works.append(EncoderWork(total * FORWARD_SHARE, total * (1 - FORWARD_SHARE), readers))
            batches.append(works)
        found = step_time(grid.T.tolist(), batches, meet=settings.sync_every == "microbatch")
        makespan, work = makespan + found.makespan, work + found.work
        if settings.sync_every == "microbatch":
            own = step.samples
            least += least_step_time(grid, costs[own], encoder[own], encoder_ranks=settings.encoder_ranks)
    if not work:
        return {"flow_gap": 0.0}
    bound = {"flow_bound": 100 * max(0.0, least / work - 1)} if settings.sync_every == "microbatch" else {}
    return {"flow_gap": 100 * (makespan / work - 1)} | bound
