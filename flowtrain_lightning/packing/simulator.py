"""The one model of a step's time: its graph, played event by event. Only computing takes time.

A *lane* is what a rank does for one role. The rules, which :func:`graph_of_step` and :func:`play` follow:

1. A member of a role that reads computes its batches in order, forward and backward of each at once, when all that it
   reads is there. Where others read from it, some of its batches are open until these have given gradients, as many as
   `in_order` lets. Members that synchronise begin a forward together.
2. A member of a role that is read computes the forwards of its batches in order, and their backwards in that order. A
   backward can begin once all batches that read it are done. A forward goes before a backward. Ranks that share the
   work of a member begin it together, once all of them are free.
3. A member keeps the activations of at most ``in_flight`` batches from forward to backward; a forward that would keep
   more waits. Nothing is kept of a *recomputed* batch: its forward runs again before its backward.
4. A rank of several roles does one thing at a time, what reads first; where ranks need each other to compute, in the
   fixed order of `taking_turns`.
5. Ranks of a role that reads begin a step when all of them have ended the one before; the others when all ranks
   have. Ranks that only produce, and do not train, work ahead into later steps.

Whoever needs the time of a step asks here: :func:`simulate_steps` for consecutive steps, :func:`simulate_step` for one
by itself, and searches :func:`closed_form_time`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.graph_of_step import graph_of_step
from flowtrain_lightning.packing.play import play
from flowtrain_lightning.packing.step_graph import Work
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray
from flowtrain_lightning.packing.step_work import FORWARD_SHARE, StepRules, StepWork


@dataclass(frozen=True)
class SimulatedSpan:
    """A piece of one rank's computing.

    Attributes:
        step: which of the simulated steps.
        work: what is computed.
        rank: who computes.
        start: time since the first step's begin.
        end: time since the first step's begin.
    """

    step: int
    work: Work
    rank: int
    start: float
    end: float


@dataclass(frozen=True)
class SimulatedSteps:
    """Consecutive steps.

    Attributes:
        step_ends: when the ranks of roles that read ended each step, since the first step's begin.
        spans: everything that was computed.
    """

    step_ends: list[float]
    spans: list[SimulatedSpan]


@dataclass(frozen=True)
class SimulatedStep:
    """A step by itself, which all ranks begin at the same time.

    Attributes:
        makespan: time from its begin until the last lane is done.
        work: time that the busiest rank computes; a recomputed forward is not counted again.
    """

    makespan: float
    work: float


def simulate_steps(steps: Sequence[StepWork], rules: StepRules) -> SimulatedSteps:
    """Simulate consecutive steps.

    Raises:
        BlockedError: no rank can go on, for instance since ``in_flight`` is too small for this order.
    """
    last, producers = rules.ranks_of(only_produces=False), rules.ranks_of(only_produces=True)
    free = dict.fromkeys(last | producers, 0.0)
    step_ends: list[float] = []
    spans: list[SimulatedSpan] = []
    for number, work in enumerate(steps):
        graph, seconds = graph_of_step(work, rules)
        played = play(graph, seconds, free)
        spans += [
            SimulatedSpan(number, graph.works[each], rank, played.begins[each], played.ends[each])
            for each in played.order
            for rank in graph.ranks[each]
        ]
        step_ends.append(max((played.free[rank] for rank in last), default=0.0))
        everyone = max(played.free.values(), default=0.0)
        for rank in free:
            if rank not in producers:
                free[rank] = step_ends[-1]
            elif rank in last or not rules.steps_ahead:
                free[rank] = everyone
            else:
                oldest_open = number + 1 - rules.steps_ahead
                free[rank] = max(played.free[rank], step_ends[oldest_open - 1] if oldest_open > 0 else 0.0)
    return SimulatedSteps(step_ends, spans)


def simulate_step(work: StepWork, rules: StepRules) -> SimulatedStep:
    """Simulate one step by itself.

    Raises:
        BlockedError: no rank can go on.
    """
    free = dict.fromkeys(rules.ranks_of(only_produces=False) | rules.ranks_of(only_produces=True), 0.0)
    busy = dict(free)
    for role, members in work.items():
        for ranks, batches in zip(rules.ranks[role], members, strict=True):
            for rank in ranks:
                busy[rank] += sum(batch.seconds for batch in batches)
    played = play(*graph_of_step(work, rules), free)
    return SimulatedStep(max(played.free.values(), default=0.0), max(busy.values(), default=0.0))


@compiled
def closed_form_time(order: IntArray, cost: FloatArray, media: FloatArray) -> float:
    """The result of :func:`simulate_step` for steps whose encoder ranks all have the same to do; for searches.

    It is the simulator's special case with lanes on ranks of their own, an encoder that trains, no limit on kept
    activations, and of each position one batch on every encoder rank, all of equal cost, which all backbone lanes read.

    Args:
        order: ``[positions]`` the order of the positions.
        cost: ``[positions, lanes]`` of the backbone's lanes; where ranks synchronise at every microbatch, one lane with
            the cost of the slowest rank.
        media: ``[positions]`` what each costs every encoder rank, forward and backward; 0 where it reads no media.
    """
    ends = np.zeros(len(order), dtype=np.float64)
    longest, encoder = 0.0, 0.0
    for lane in range(cost.shape[1]):
        now, encoder = 0.0, 0.0
        for index in range(len(order)):
            own = media[order[index]]
            if own > 0.0:
                encoder += own * FORWARD_SHARE
                now = max(now, encoder)
            now += cost[order[index], lane]
            ends[index] = max(ends[index], now)
        longest = max(longest, now)
    for index in range(len(order)):
        own = media[order[index]]
        if own > 0.0:
            encoder = max(encoder, ends[index]) + own * (1.0 - FORWARD_SHARE)
    return max(longest, encoder)
