"""The one model of a step's time: the rules of the lanes, simulated event by event. Only computing takes time.

A *lane* is what a rank does for one role. The rules, which :class:`_StepSimulation` follows:

1. A backbone lane computes its microbatches in order, each once all features that it reads are there. Where ranks
   synchronise at every microbatch, or share its work, all backbone lanes of the group that have one left begin it
   together, once all have theirs.
2. An encoder lane computes the forwards of its batches in order, and their backwards in that order. A backward can
   begin once all microbatches that read the batch are done. A forward goes before a backward. Lanes that share the
   work of a batch begin it together, once all their ranks are free.
3. An encoder lane keeps the activations of at most ``kept_batches`` batches from forward to backward; a forward that
   would keep more waits. Nothing is kept of a *recomputed* batch: its forward runs again before its backward.
4. A rank that has both lanes does one thing at a time, the backbone's first; where ranks need each other to compute,
   in the fixed order of `LaneOrder`.
5. Backbone ranks begin a step when all of them have ended the one before; ranks that encode when all ranks have. Ranks
   that only encode, and do not train, work ahead into later steps.

Whoever needs the time of a step asks here: :func:`simulate_steps` for consecutive steps, :func:`simulate_step` for one
by itself, :func:`recomputed_batches` for what rule 3 makes a plan recompute, and searches :func:`closed_form_time`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray, StepPlan
from flowtrain_lightning.packing.step_work import FORWARD_SHARE, Lanes, StepWork, step_work
from flowtrain_lightning.packing.work_order import Lane, LaneOrder

Kind = Literal["microbatch", "forward", "backward"]


@dataclass(frozen=True)
class SimulatedSpan:
    """What one rank computes in one piece.

    Attributes:
        step: which of the simulated steps.
        kind: a microbatch, or the forward or the backward of an encoder batch.
        rank: who computes.
        lane: which backbone lane, or which encoder lane.
        number: which microbatch or encoder batch of that lane.
        start: time since the first step's begin.
        end: time since the first step's begin.
    """

    step: int
    kind: Kind
    rank: int
    lane: int
    number: int
    start: float
    end: float


@dataclass(frozen=True)
class SimulatedSteps:
    """Consecutive steps.

    Attributes:
        backbone_ends: when the backbone ended each step, since the first step's begin.
        spans: everything that was computed.
    """

    backbone_ends: list[float]
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


def simulate_steps(steps: Sequence[StepWork], lanes: Lanes) -> SimulatedSteps:
    """Simulate consecutive steps.

    Raises:
        ValueError: no lane can go on, for instance since ``kept_batches`` is too small for this order.
    """
    free = dict.fromkeys(lanes.ranks, 0.0)
    backbone_ends: list[float] = []
    spans: list[SimulatedSpan] = []
    for number, work in enumerate(steps):
        simulation = _StepSimulation(work, lanes, free)
        ended = simulation.run()
        spans += [SimulatedSpan(number, *span) for span in simulation.spans]
        backbone_ends.append(max((ended[rank] for rank in lanes.backbone), default=0.0))
        everyone = max(ended.values(), default=0.0)
        for rank in free:
            if rank not in lanes.encoder:
                free[rank] = backbone_ends[-1]
            elif rank in lanes.backbone or not lanes.steps_ahead:
                free[rank] = everyone
            else:
                oldest_open = number + 1 - lanes.steps_ahead
                free[rank] = max(ended[rank], backbone_ends[oldest_open - 1] if oldest_open > 0 else 0.0)
    return SimulatedSteps(backbone_ends, spans)


def simulate_step(work: StepWork, lanes: Lanes) -> SimulatedStep:
    """Simulate one step by itself.

    Raises:
        ValueError: no lane can go on.
    """
    ended = _StepSimulation(work, lanes, dict.fromkeys(lanes.ranks, 0.0)).run()
    busy = dict.fromkeys(ended, 0.0)
    for rank, times in zip(lanes.backbone, work.microbatches, strict=True):
        busy[rank] += sum(times)
    for rank, batches in zip(lanes.encoder, work.encoder_batches, strict=True):
        busy[rank] += sum(batch.forward + batch.backward for batch in batches)
    return SimulatedStep(max(ended.values(), default=0.0), max(busy.values(), default=0.0))


def recomputed_batches(plan: StepPlan, kept_batches: int) -> tuple[frozenset[int], ...]:
    """The batches that an encoder which trains has to recompute, so that no lane ever blocks.

    With few kept activations the order of a step could block: an encoder batch waits for the gradients of a microbatch
    that waits for features of a later batch, which may not run yet. So the step is simulated, and wherever no lane can
    go on, the next waiting batch is marked as recomputed: of several lanes' the one with the lowest number, then that
    of the lowest rank. Where lanes block does not depend on durations, so the plan alone decides.

    Args:
        plan: the step's plan.
        kept_batches: encoder batches per rank whose activations may be kept at a time, from 0.

    Returns:
        for each encoder rank the numbers of its recomputed batches.
    """
    work = step_work(plan, lambda _: 1.0, lambda _: (1.0, 1.0))
    lanes = Lanes.separate(work, sync_every="step", kept_batches=kept_batches)
    simulation = _StepSimulation(work, lanes, dict.fromkeys(lanes.ranks, 0.0), recompute_where_blocked=True)
    simulation.run()
    return tuple(map(frozenset, simulation.recomputed))


@compiled
def closed_form_time(order: IntArray, cost: FloatArray, media: FloatArray) -> float:
    """What :func:`simulate_step` finds for steps whose encoder ranks all have the same to do; for searches.

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


def _lane_orders(work: StepWork, lanes: Lanes) -> dict[int, list[Lane]]:
    """Rank with both lanes -> whose turn it is, from now on."""
    found: dict[int, list[Lane]] = {}
    for rank, batches in zip(lanes.encoder, work.encoder_batches, strict=True):
        if rank in lanes.backbone:
            positions = len(work.microbatches[lanes.backbone.index(rank)])
            encoded = tuple(batch.turn[0] for batch in batches)
            kept = len(batches) if lanes.kept_batches is None else lanes.kept_batches
            trains = any(batch.backward > 0 for batch in batches)
            found[rank] = list(LaneOrder(positions, encoded, max(1, kept)).order(trains))
    return found


class _StepSimulation:
    """One step: how far each lane has come in its order, and what the lanes wait for from each other.

    Args:
        work: what there is to compute.
        lanes: who computes.
        start: rank -> when it is free.
        recompute_where_blocked: mark a batch as recomputed where no lane can go on, instead of raising.

    Attributes:
        spans: what was computed: the attributes of a :class:`SimulatedSpan` without the step.
        recomputed: for each encoder lane the numbers of its recomputed batches.
    """

    def __init__(
        self, work: StepWork, lanes: Lanes, start: Mapping[int, float], recompute_where_blocked: bool = False
    ) -> None:
        self.spans: list[tuple[Kind, int, int, int, float, float]] = []
        self.recomputed = [{n for n, batch in enumerate(own) if batch.recomputed} for own in work.encoder_batches]
        self._recompute_where_blocked = recompute_where_blocked
        self._lanes = lanes
        self._microbatches = work.microbatches
        self._batches = work.encoder_batches
        self._backbone_groups, self._encoder_groups = lanes.backbone_groups, lanes.encoder_groups
        # How far each lane has come.
        self._done = [0] * len(work.microbatches)
        self._entered: set[int] = set()  # backbone lanes that wait at a microbatch for the others
        self._forwards = [0] * len(work.encoder_batches)
        self._backwards = [0] * len(work.encoder_batches)
        self._kept = [0] * len(work.encoder_batches)
        self._forwards_left = sum(len(own) for own in work.encoder_batches)
        # What the lanes wait for from each other.
        self._missing_features = [[0] * len(own) for own in work.microbatches]  # counted in batches
        self._missing_gradients = [[len(batch.readers) for batch in own] for own in work.encoder_batches]
        self._sources: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for lane, batches in enumerate(work.encoder_batches):
            for number, batch in enumerate(batches):
                for reader, position in batch.readers:
                    self._missing_features[reader][position] += 1
                    self._sources.setdefault((reader, position), []).append((lane, number))
        self._lane_order = _lane_orders(work, lanes) if lanes.in_fixed_order else {}
        self._ended = dict(start)
        self._busy = set(start)
        # A heap of what runs: its end, the rank, what it is, the lane, and the number of the microbatch or batch.
        self._running: list[tuple[float, int, Kind | None, int, int]]
        self._running = [(time, rank, None, -1, -1) for rank, time in start.items()]
        heapq.heapify(self._running)

    def run(self) -> dict[int, float]:
        """When each rank has ended the step.

        Raises:
            ValueError: no lane can go on.
        """
        now = 0.0
        while self._running or not self._is_over():
            if self._running:
                now = self._running[0][0]
                while self._running and self._running[0][0] == now:
                    self._finish(*heapq.heappop(self._running))
            elif self._entered:  # ranks that wait for others, which wait for what the former have yet to encode
                self._busy.difference_update(self._lanes.backbone[lane] for lane in self._entered)
                self._entered.clear()
            else:
                self._recompute_next()
            self._begin_microbatches(now)
            self._begin_encoding(now)
        return self._ended

    def _is_over(self) -> bool:
        done = zip((*self._done, *self._backwards), (*self._microbatches, *self._batches), strict=True)
        return all(count == len(own) for count, own in done)

    def _recompute_next(self) -> None:
        """No lane can go on: mark the next waiting batch as recomputed, or raise."""
        waiting = [
            (number, lane)
            for lane, number in enumerate(self._forwards)
            if number < len(self._batches[lane]) and self._lanes.encoder[lane] not in self._busy
        ]
        if not (self._recompute_where_blocked and waiting):
            raise ValueError(
                f"kept_batches={self._lanes.kept_batches} keeps too few encoder batches for this order; allow more, or "
                "mark batches as recomputed."
            )
        number, lane = min(waiting)
        self.recomputed[lane].add(number)

    def _begin_microbatches(self, now: float) -> None:
        if self._lanes.encoder_first and self._forwards_left:
            return
        for group in self._backbone_groups:
            unfinished = [lane for lane in group if self._done[lane] < len(self._microbatches[lane])]
            if any(self._missing_features[lane][self._done[lane]] for lane in unfinished):
                continue  # a rank that waited for another one's features now could not encode what others wait for
            free = [lane for lane in unfinished if self._can_begin("backbone", self._lanes.backbone[lane])]
            self._busy.update(self._lanes.backbone[lane] for lane in free)
            self._entered.update(free)
            if self._entered.issuperset(unfinished):
                for lane in unfinished:
                    time = self._microbatches[lane][self._done[lane]]
                    self._begin("microbatch", self._lanes.backbone[lane], lane, self._done[lane], now, time)
                self._entered.difference_update(unfinished)

    def _begin_encoding(self, now: float) -> None:
        for group in self._encoder_groups:
            if all(self._can_begin("encoder", self._lanes.encoder[lane]) for lane in group):
                self._begin_batch(group, now)

    def _can_begin(self, lane: Lane, rank: int) -> bool:
        """The rank is free, and not bound to do something for its other lane next."""
        return rank not in self._busy and self._lane_order.get(rank, [])[:1] in ([], [lane])

    def _begin_batch(self, group: Iterable[int], now: float) -> None:
        """What the lanes of a group, which all have come equally far, can do next."""
        limit = self._lanes.kept_batches
        for lane in group:
            rank, batches = self._lanes.encoder[lane], self._batches[lane]
            number, first = self._forwards[lane], self._backwards[lane]
            while first < number and batches[first].backward == 0:
                first = self._backwards[lane] = first + 1
            fits = limit is None or self._kept[lane] < limit
            if number < len(batches) and (fits or not self._keeps(lane, number)):
                self._begin("forward", rank, lane, number, now, batches[number].forward)
            elif first < number and self._missing_gradients[lane][first] == 0:
                again = batches[first].forward if first in self.recomputed[lane] else 0.0
                self._begin("backward", rank, lane, first, now, again + batches[first].backward)

    def _keeps(self, lane: int, number: int) -> bool:
        """Activations of the batch are kept from its forward to its backward."""
        return self._batches[lane][number].backward > 0 and number not in self.recomputed[lane]

    def _begin(self, kind: Kind, rank: int, lane: int, number: int, now: float, time: float) -> None:
        self._busy.add(rank)
        if self._lane_order.get(rank):
            self._lane_order[rank].pop(0)
        self.spans.append((kind, rank, lane, number, now, now + time))
        heapq.heappush(self._running, (now + time, rank, kind, lane, number))

    def _finish(self, now: float, rank: int, kind: Kind | None, lane: int, number: int) -> None:
        self._busy.discard(rank)
        self._ended[rank] = now
        if kind == "microbatch":
            self._done[lane] += 1
            for source, batch in self._sources.get((lane, number), ()):
                self._missing_gradients[source][batch] -= 1
        elif kind == "forward":
            self._forwards[lane] += 1
            self._forwards_left -= 1
            self._kept[lane] += self._keeps(lane, number)
            for reader, position in self._batches[lane][number].readers:
                self._missing_features[reader][position] -= 1
        elif kind == "backward":
            self._backwards[lane] += 1
            self._kept[lane] -= self._keeps(lane, number)
