"""How good a packing is: unused budget, waiting ranks, drift of composition."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from flowtrain_lightning.packing.plan import FloatArray


@dataclass(frozen=True)
class PackingMetrics:
    """Figures of some steps; all but ``imb``, ``row`` and ``mixcv`` in percent, and less is better.

    Idle figures are ratios of sums over all steps, not means of ratios.

    Attributes:
        pad: unused token budget.
        imb: costliest microbatch of a step / mean one, mean over steps.
        row: costliest microbatch of a row / mean one, mean over rows and steps.
        idle_sync: time that ranks wait if they meet at every microbatch.
        idle_acc: time that ranks wait if they meet once a step.
        idle_enc: ``idle_sync`` with the encoder's cost of what the microbatches read.
        idle_two: waiting if an encoder phase and a backbone phase each meet at every microbatch.
        mixcv: standard deviation / mean, over steps, of the samples per microbatch.
        over: microbatches over the token budget.
    """

    pad: float
    imb: float
    row: float
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
        cost: ``[steps, rows, ranks]`` backbone cost of each microbatch.
        encoder_cost: ``[steps, rows, ranks]`` encoder cost of what each reads.
        tokens: ``[steps, rows, ranks]`` tokens of each.
        samples: ``[steps, rows, ranks]`` samples of each.
        budget: the most tokens of a microbatch.
    """
    ranks = cost.shape[2]
    per_step = samples.mean(axis=(1, 2))
    both = (cost.sum() + encoder_cost.sum()) / ranks
    return PackingMetrics(
        pad=100 * (1 - tokens.mean() / budget),
        imb=_mean_ratio(cost.reshape(len(cost), -1)),
        row=_mean_ratio(cost),
        idle_sync=_idle(cost.sum() / ranks, cost.max(axis=2).sum()),
        idle_acc=_idle(cost.sum() / ranks, cost.sum(axis=1).max(axis=1).sum()),
        idle_enc=_idle(encoder_cost.sum() / ranks, encoder_cost.max(axis=2).sum()),
        idle_two=_idle(both, (cost.max(axis=2) + encoder_cost.max(axis=2)).sum()),
        mixcv=float(per_step.std() / per_step.mean()),
        over=100 * float((tokens > budget).mean()),
    )


def encoder_idle(loads: FloatArray) -> float:
    """Percent of their time that encoder ranks wait if they meet once a step: mean / max over ranks, summed over steps.

    Args:
        loads: ``[steps, encoder ranks]`` encoder cost of each rank.
    """
    return _idle(loads.sum() / loads.shape[1], loads.max(axis=1).sum())


def _idle(busy: float, time: float) -> float:
    return 100 * float(1 - busy / time) if time > 0 else 0.0


def _mean_ratio(loads: FloatArray) -> float:
    mean = loads.mean(axis=-1)
    return float(np.where(mean > 0, loads.max(axis=-1) / np.where(mean > 0, mean, 1), 1.0).mean())
