"""How long a step's microbatches and encoder batches took, on all ranks: what cost models are fitted to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.pool import Pool
from flowtrain_lightning.runtime.encoder_lane import STEPS_AHEAD
from flowtrain_lightning.runtime.groups import Groups
from flowtrain_lightning.runtime.step import Step
from flowtrain_lightning.runtime.timeline import COMPUTE, Timeline

Times = dict[str, list[list[float]]]
"""Role -> ``[tokens or patches, sum of their squares, seconds]`` of every microbatch or encoder batch."""

_PATIENCE = 2 * STEPS_AHEAD
"""Steps after which nobody looks any more for what an encoder rank may have sent."""


class TimesExchange:
    """Brings the times of all ranks to the backbone ranks, in whose report they reach the others.

    Encoder ranks send theirs through the pool, as an encoder that works ahead must not be made to wait; what has not
    arrived when a step ends is in the report of a later one.

    Args:
        timeline: of this rank.
        groups: of this rank.
        senders: global rank of every encoder rank that has no backbone lane, by its rank within the role.
        reader: global rank of the first backbone rank.
    """

    def __init__(self, timeline: Timeline, groups: Groups, senders: Sequence[int], reader: int) -> None:
        self._timeline = timeline
        self._groups = groups
        self._senders = senders
        self._reader = reader

    def send(self, step: Step, pool: Pool) -> None:
        """From an encoder rank; nothing is sent where there is no room for it."""
        times = measured(step, self._timeline)[ENCODER]
        rank = step.batch.part.encoder_rank
        if times and rank is not None:
            pool.put(step.times_key(rank), [torch.tensor(times, dtype=torch.float64)], [self._reader])

    def gather(self, step: Step, pool: Pool) -> Times:
        """On every backbone rank: the same on all of them."""
        own = measured(step, self._timeline)
        if self._groups.cross.rank == self._reader:
            pool.poll()
            own[ENCODER] += self._arrived(step, pool)
        everyone = self._groups.gather_over_role(own)
        return {role: [times for of_rank in everyone for times in of_rank[role]] for role in (BACKBONE, ENCODER)}

    def _arrived(self, step: Step, pool: Pool) -> list[list[float]]:
        found: list[list[float]] = []
        for index in range(max(0, step.index - _PATIENCE), step.index + 1):
            for encoder_rank in range(len(self._senders)):
                lease = pool.get(Step(step.batch, step.stage, index, step.trains).times_key(encoder_rank))
                if lease is not None:
                    found += lease.tensors[0].tolist()
                    lease.release()
        return found


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
    part, plan = step.batch.part, step.plan
    times: Times = {BACKBONE: [], ENCODER: []}
    for (role, number), spent in sorted(seconds.items()):
        if role == BACKBONE and part.backbone_rank is not None:
            sizes = plan.sizes.tokens[plan.microbatches[part.backbone_rank][number]]
        elif part.encoder_rank is not None:
            sizes = plan.sizes.media_patches[plan.encoder_batches[part.encoder_rank][number]]
        times[role].append([*_sums(sizes), spent])
    return times


def _sums(sizes: IntArray) -> tuple[float, float]:
    return float(sizes.sum()), float((sizes.astype("float64") ** 2).sum())
