"""How long a step's microbatches and encoder batches took, on all ranks: what cost models are fitted to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.runtime.encoder_lane import STEPS_AHEAD
from flowtrain_lightning.runtime.step import Step
from flowtrain_lightning.runtime.timeline import COMPUTE, Timeline

Times = dict[str, list[list[float]]]
"""Role -> ``[tokens or patches, sum of their squares, seconds]`` of every microbatch or encoder batch."""


def measured(step: Step, timeline: Timeline) -> Times:
    """What this rank computed in a step, an encoder's forwards and backwards together."""
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    for span in reversed(timeline.spans):
        if span.stage != step.stage:
            continue
        if span.step < step.index - STEPS_AHEAD:
            break  # whatever came before was recorded before this step, or a step so far behind it, began
        if span.step == step.index and span.kind == COMPUTE and span.number >= 0:
            seconds[span.lane, span.number] += span.end - span.start
    shard, plan = step.batch.shard, step.plan
    times: Times = {BACKBONE: [], ENCODER: []}
    for (role, number), spent in sorted(seconds.items()):
        if role == BACKBONE and shard.backbone_rank is not None:
            sizes = plan.sizes.tokens[plan.microbatches[shard.backbone_rank][number]]
        elif shard.encoder_rank is not None:
            sizes = plan.sizes.media_patches[plan.encoder_batches[shard.encoder_rank][number]]
        times[role].append([*_sums(sizes), spent])
    return times


def of_all_ranks(everyone: Sequence[Times]) -> Times:
    """The times of several ranks as one."""
    return {role: [times for of_rank in everyone for times in of_rank[role]] for role in (BACKBONE, ENCODER)}


def _sums(sizes: IntArray) -> tuple[float, float]:
    return float(sizes.sum()), float((sizes.astype("float64") ** 2).sum())
