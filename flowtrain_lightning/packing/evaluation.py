"""Measures a packing: unused budget, waiting ranks, drift of composition."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from flowtrain_lightning.packing.offline import OfflinePlan, OfflineSettings, PackedStep, cost_of_media
from flowtrain_lightning.packing.role_graph import BACKBONE, ENCODER, Edge
from flowtrain_lightning.packing.simulator import simulate_step
from flowtrain_lightning.packing.step_graph import BatchOf, Meeting
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray
from flowtrain_lightning.packing.step_work import StepRules, TimedBatch, in_two_passes

_SIMULATED_STEPS = 50
"""Steps that are simulated for ``flow_gap``, evenly chosen."""


def evaluate(
    plan: OfflinePlan, tokens: IntArray, media_start: IntArray, media_cost: FloatArray, settings: OfflineSettings
) -> dict[str, float]:
    """Every figure of a plan by name; idle figures in percent.

    Args:
        plan: the packing.
        tokens: ``[samples]`` tokens of each sequence.
        media_start: ``[samples + 1]`` the media items of sample ``i`` are ``media_start[i]:media_start[i + 1]``.
        media_cost: ``[media items]`` what encoding each costs, in the unit of ``settings.cost``.
        settings: how the plan was made.
    """
    figures: dict[str, float] = {"steps": len(plan.steps), "samples_left": len(plan.left)}
    if plan.steps:
        costs, encoder_cost = settings.cost.of_each(tokens), _read_first(plan, media_start, media_cost)
        positions = max(step.positions for step in plan.steps)
        quantities = (costs, encoder_cost, tokens, np.ones(len(tokens)))
        cost, encoder, filled, samples = (
            np.array([_grid(step, values, positions, settings.ranks) for step in plan.steps]) for values in quantities
        )
        figures |= measure(cost, encoder, filled, samples, settings.token_budget).as_dict()
        used = sum(step.positions for step in plan.steps) * settings.ranks
        figures["pad"] = 100 * (1 - filled.sum() / (used * settings.token_budget))
        loads = [[sum(media_cost[batch].sum() for batch in rank) for rank in s.encoder_batches] for s in plan.steps]
        figures["encoder_idle"] = encoder_idle(np.array(loads))
        delays = np.concatenate([step.delay for step in plan.steps])
        figures["max_delay_seen"] = int(delays.max())
        figures["p999_delay"] = float(np.quantile(delays, 0.999))
        figures["mean_delay"] = float(delays.mean())
        figures["flow_gap"] = _flow_gap(plan, costs, media_start, media_cost, settings)
        loads_of = [(costs[step.samples], step.positions * settings.ranks) for step in plan.steps]
        figures["samples_to_split"] = sum(int((load > load.sum() / bins).sum()) for load, bins in loads_of)
    figures["microseconds_per_sample"] = 1e6 * plan.seconds / max(1, len(tokens))
    return figures


@dataclass(frozen=True)
class PackingMetrics:
    """Figures of some steps; all but ``imb``, ``imb_position`` and ``mixcv`` in percent. Less is better.

    Idle figures are ratios of sums over all steps, not means of ratios.

    Attributes:
        pad: unused token budget.
        imb: costliest microbatch of a step / mean one, mean over steps.
        imb_position: costliest microbatch of a position / mean one, mean over positions and steps.
        idle_sync: time that ranks wait if they synchronise at every microbatch.
        idle_acc: time that ranks wait if they synchronise once a step.
        idle_enc: ``idle_sync`` with the encoder's cost of what the microbatches read.
        idle_two: waiting if an encoder phase and a backbone phase each synchronise at every microbatch.
        mixcv: standard deviation / mean, over steps, of the samples per microbatch.
        over: microbatches over the token budget.
    """

    pad: float
    imb: float
    imb_position: float
    idle_sync: float
    idle_acc: float
    idle_enc: float
    idle_two: float
    mixcv: float
    over: float

    def as_dict(self) -> dict[str, float]:
        """Name -> figure."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def measure(
    cost: FloatArray, encoder_cost: FloatArray, tokens: FloatArray, samples: FloatArray, budget: int
) -> PackingMetrics:
    """The metrics of steps that all have the same number of microbatches.

    Args:
        cost: ``[steps, positions, ranks]`` backbone cost of each microbatch.
        encoder_cost: ``[steps, positions, ranks]`` encoder cost of what each reads.
        tokens: ``[steps, positions, ranks]`` tokens of each.
        samples: ``[steps, positions, ranks]`` samples of each.
        budget: the most tokens of a microbatch.
    """
    ranks = cost.shape[2]
    per_step = samples.mean(axis=(1, 2))
    both = (cost.sum() + encoder_cost.sum()) / ranks
    return PackingMetrics(
        pad=100 * (1 - tokens.mean() / budget),
        imb=_mean_ratio(cost.reshape(len(cost), -1)),
        imb_position=_mean_ratio(cost),
        idle_sync=_idle(cost.sum() / ranks, cost.max(axis=2).sum()),
        idle_acc=_idle(cost.sum() / ranks, cost.sum(axis=1).max(axis=1).sum()),
        idle_enc=_idle(encoder_cost.sum() / ranks, encoder_cost.max(axis=2).sum()),
        idle_two=_idle(both, (cost.max(axis=2) + encoder_cost.max(axis=2)).sum()),
        mixcv=float(per_step.std() / per_step.mean()),
        over=100 * float((tokens > budget).mean()),
    )


def encoder_idle(loads: FloatArray) -> float:
    """Percent of their time that encoder ranks wait if they synchronise once a step.

    Args:
        loads: ``[steps, encoder ranks]`` encoder cost of each rank.
    """
    return _idle(loads.sum() / loads.shape[1], loads.max(axis=1).sum())


def _idle(busy: float, time: float) -> float:
    return 100 * float(1 - busy / time) if time > 0 else 0.0


def _mean_ratio(loads: FloatArray) -> float:
    mean = loads.mean(axis=-1)
    return float(np.where(mean > 0, loads.max(axis=-1) / np.where(mean > 0, mean, 1), 1.0).mean())


def _grid(step: PackedStep, values: IntArray | FloatArray, positions: int, ranks: int) -> FloatArray:
    """``[positions, ranks]`` the sum of some quantity of the samples of each microbatch."""
    sums = np.bincount(step.bin_of, values[step.samples], minlength=positions * ranks)
    return sums.astype(np.float64).reshape(positions, ranks)


def _read_first(plan: OfflinePlan, media_start: IntArray, media_cost: FloatArray) -> FloatArray:
    """``[samples]`` what encoding the media items of each costs that are encoded for it."""
    costs = media_cost.copy()
    for step in plan.steps:
        costs[list(step.encoded_as)] = 0.0
    return cost_of_media(media_start, costs)


def _flow_gap(
    plan: OfflinePlan, costs: FloatArray, media_start: IntArray, media_cost: FloatArray, settings: OfflineSettings
) -> float:
    """Percent by which steps are longer than the work of their busiest lane, with an encoder that trains."""
    makespan = work = 0.0
    owner = np.repeat(np.arange(len(media_start) - 1), np.diff(media_start))
    chosen = np.unique(np.linspace(0, len(plan.steps) - 1, _SIMULATED_STEPS).astype(int))
    for step in (plan.steps[number] for number in chosen.tolist()):
        grid = np.zeros((step.positions, settings.ranks))
        np.add.at(grid.ravel(), step.bin_of, costs[step.samples])
        encoding = []
        also = _samples_by_source(step, owner)
        for of_rank in step.encoder_batches:
            batches = []
            for batch in of_rank:
                reading = np.concatenate([owner[batch], *(also[item] for item in batch.tolist() if item in also)])
                bins = np.unique(step.bin_of[np.searchsorted(step.samples, reading)])
                readers = tuple(BatchOf(BACKBONE, int(b % settings.ranks), int(b // settings.ranks)) for b in bins)
                batches.append(TimedBatch(*in_two_passes(float(media_cost[batch].sum()))[:2], readers))
            encoding.append(batches)
        microbatches = [[TimedBatch(*in_two_passes(time)[:2]) for time in of_rank] for of_rank in grid.T.tolist()]
        meets = {BACKBONE: Meeting(1, settings.ranks, ("forward", "backward"))}
        step_work = {BACKBONE: microbatches, ENCODER: encoding}
        rules = StepRules.separate(
            step_work, [Edge(ENCODER, BACKBONE)], meets=meets if settings.sync_every == "microbatch" else {}
        )
        found = simulate_step(step_work, rules)
        makespan, work = makespan + found.makespan, work + found.work
    return 100 * (makespan / work - 1) if work else 0.0


def _samples_by_source(step: PackedStep, owner: IntArray) -> dict[int, list[int]]:
    """Media item that is encoded -> the samples that have one in whose place it is."""
    found: dict[int, list[int]] = {}
    for item, source in step.encoded_as.items():
        found.setdefault(source, []).append(int(owner[item]))
    return found
