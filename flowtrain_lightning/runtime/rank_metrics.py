"""Metrics of one rank: shares of its time, its part of the pool, and the seconds of its batches."""

from __future__ import annotations

import resource
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.data.producers.loading_pace import LoadingPace
from flowtrain_lightning.packing import IntArray, StepPlan
from flowtrain_lightning.packing.step_work import STEPS_AHEAD
from flowtrain_lightning.parallel.experts.expert_counts import ExpertCounts
from flowtrain_lightning.parallel.experts.expert_parallel import experts_of
from flowtrain_lightning.parallel.experts.experts import ExpertExchange, counts_of, exchange_of
from flowtrain_lightning.parallel.halves import HalvedModule
from flowtrain_lightning.pool import PoolCounters
from flowtrain_lightning.runtime.job import Job
from flowtrain_lightning.runtime.step import Step
from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE, STALL, Timeline

Timings = dict[str, list[list[float]]]
"""Role -> ``[tokens or patches, sum of their squares, seconds]`` of every microbatch or encoder batch."""


class RankMetrics:
    """Takes the metrics of one rank, each time those since the last.

    Args:
        lanes: role -> what this rank is in it, such as ``"encoder 1"``.
        label: what this rank is in all its roles.
        timeline: of this rank.
        exchanges: role -> of the layers whose experts this rank shares with others.
        counts: role -> of all layers that have experts.
    """

    def __init__(
        self,
        lanes: dict[str, str],
        label: str,
        timeline: Timeline,
        exchanges: Mapping[str, Sequence[ExpertExchange]] | None = None,
        counts: Mapping[str, Sequence[ExpertCounts]] | None = None,
    ) -> None:
        self._lanes = lanes
        self._label = label
        self._timeline = timeline
        self._exchanges, self._counts = exchanges or {}, counts or {}
        self._totals = dict(timeline.totals)
        self._counters: PoolCounters | None = None
        self._taken = time.monotonic()

    @classmethod
    def of(cls, job: Job, timeline: Timeline, module: HalvedModule) -> RankMetrics:
        """Those of the calling rank, which trains a module."""
        lanes = {role: f"{role} {job.allocation.rank_within(role, job.rank)}" for role in job.roles}
        halves = {role: [module.get_submodule(path) for path in module.halves[role]] for role in job.roles}
        exchanges = {role: [*filter(None, map(exchange_of, experts_of(half)))] for role, half in halves.items()}
        counts = {role: [*map(counts_of, experts_of(half))] for role, half in halves.items()}
        return cls(lanes, job.labels[job.rank], timeline, exchanges, counts)

    def take(self, counters: PoolCounters | None, pace: LoadingPace | None = None) -> dict[str, float]:
        """The metrics since the last call.

        Args:
            counters: of this rank's part of the pool; None where there is none yet.
            pace: of this rank's loader.

        Returns:
            under ``time/`` for every lane the shares of ``compute``, ``stall`` and ``communication`` in its time, from
            0 to 1; under ``data/`` the share in which the rank waited for its loader, and how many producers it lacks;
            under ``memory/`` the most bytes that the rank has had so far, on its GPU or else on the host; under
            ``pool/`` ``put`` and ``read`` in bytes per second, ``waiting``, the share of time in which it waited for
            something to come through the pool, ``refused``, how often an entry found no room, ``peak``, the share of
            its bytes that was taken at most since the pool was opened, and ``fallbacks``, how many entries from a GPU
            went through host memory; under ``experts/`` how often this rank's tokens chose each ``expert`` of a
            mixture, in all layers; and where ranks share them, ``rows`` that those of this rank have computed in all
            layers, ``dropped``, how many of its own came back from no expert, and ``fullest``, the most rows of one
            expert over the mean of its layer here.
        """
        now = time.monotonic()
        elapsed, self._taken = now - self._taken, now
        metrics = self._shares() | {f"memory/{self._label}": float(peak_memory())} | self._of_experts()
        if pace is not None:
            metrics |= pace.metrics(self._label)
        if counters is not None:
            metrics |= self._of_pool(counters, elapsed)
        return metrics

    def _shares(self) -> dict[str, float]:
        totals = dict(self._timeline.totals)
        metrics: dict[str, float] = {}
        for role, lane in self._lanes.items():
            spent = {
                kind: totals.get((role, kind), 0.0) - self._totals.get((role, kind), 0.0)
                for kind in (COMPUTE, STALL, COMMUNICATION)
            }
            whole = sum(spent.values())
            metrics |= {f"time/{lane} {kind}": seconds / whole if whole else 0.0 for kind, seconds in spent.items()}
        self._totals = totals
        return metrics

    def _of_experts(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for role, exchanges in self._exchanges.items():
            layers = [rows for exchange in exchanges if (rows := exchange.take_rows())]
            if layers:
                fullest = max(max(rows) * len(rows) / max(sum(rows), 1) for rows in layers)
                dropped = float(sum(exchange.take_dropped() for exchange in exchanges))
                told = {"rows": float(sum(map(sum, layers))), "dropped": dropped, "fullest": fullest}
                metrics |= {f"experts/{self._lanes[role]} {name}": value for name, value in told.items()}
        for role, counts in self._counts.items():
            chosen = zip_longest(*(each.take_told() for each in counts), fillvalue=0)
            metrics |= {f"experts/{self._lanes[role]} expert {n}": float(sum(each)) for n, each in enumerate(chosen)}
        return metrics

    def _of_pool(self, counters: PoolCounters, elapsed: float) -> dict[str, float]:
        former, self._counters = self._counters, counters
        if former is None or counters.entries < former.entries or counters.waits < former.waits:  # it was opened anew
            put = read = refused = fallbacks = 0
            waited = 0.0
        else:
            put, read, refused = former.bytes, former.leased_bytes, former.refused
            fallbacks = former.fallbacks
            waited = former.wait_seconds
        capacity = counters.current.capacity + counters.ahead.capacity
        taken = {
            "put": (counters.bytes - put) / elapsed,
            "read": (counters.leased_bytes - read) / elapsed,
            "waiting": (counters.wait_seconds - waited) / elapsed,
            "refused": counters.refused - refused,
            "fallbacks": counters.fallbacks - fallbacks,
            "peak": (counters.current.peak + counters.ahead.peak) / capacity if capacity else 0.0,
        }
        return {f"pool/{self._label} {name}": float(value) for name, value in taken.items()}


def peak_memory() -> int:
    """The most bytes that this process has had so far: of tensors on GPUs, where it uses one, else of the host's."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class _TimedStep:
    """A step without its tensors, for telling its times."""

    stage: str
    index: int
    plan: StepPlan
    shard: RankShard


class BatchTimes:
    """Tells how long this rank computed on each of its batches, an encoder's forwards and backwards together.

    A GPU comes to the end of a step after the host has gone on. Its times are told with a later step then.

    Args:
        timeline: of this rank.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._untold: deque[_TimedStep] = deque()

    def take(self, step: Step) -> Timings:
        """The times of this step, whose lanes have ended, and of those before it, as far as they are known and new."""
        self._untold.append(_TimedStep(step.stage, step.index, step.plan, step.batch.shard))
        told: list[Timings] = []
        while self._untold and self._timeline.is_settled(self._untold[0].stage, self._untold[0].index):
            told.append(_timings(self._untold.popleft(), self._timeline))
        return joined_timings(told)


def _timings(step: _TimedStep, timeline: Timeline) -> Timings:
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    for span in reversed(timeline.spans):
        if span.stage != step.stage:
            continue
        if span.step < step.index - STEPS_AHEAD:
            break  # whatever came before was recorded before this step, or a step so far behind it, began
        if span.step == step.index and span.kind == COMPUTE and span.number >= 0:
            seconds[span.lane, span.number] += span.end - span.start
    shard, plan = step.shard, step.plan
    timings: Timings = {role: [] for role in plan.graph.roles}
    for (role, number), spent in sorted(seconds.items()):
        items = plan.batches[role][shard.own[role]][number]
        timings[role].append([*_sums(plan.lengths(role)[items]), spent])
    return timings


def joined_timings(timings: Iterable[Timings]) -> Timings:
    """The timings of several ranks together."""
    joined: Timings = defaultdict(list)
    for role, batches in (item for of_rank in timings for item in of_rank.items()):
        joined[role] += batches
    return joined


def _sums(sizes: IntArray) -> tuple[float, float]:
    return float(sizes.sum()), float((sizes.astype("float64") ** 2).sum())
