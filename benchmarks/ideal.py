"""How long a run would take if nothing but the user's computing took time: the lanes' own rules, played with a list."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.emulation import EmulatedCost
from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER
from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.runtime.activations import recomputed_batches

Unit = tuple[int, int]
"""A rank within its role, and a position in its order."""


@dataclass(frozen=True)
class Rules:
    """What decides the order of a step.

    Attributes:
        allocation: which ranks play which role.
        cost: what computing costs.
        kept_batches: encoder batches whose activations each encoder rank keeps.
        encoder_first: no microbatch begins before all encoder forwards of the step are done.
    """

    allocation: Allocation
    cost: EmulatedCost
    kept_batches: int
    encoder_first: bool = False


def step_ends(plans: Sequence[StepPlan], rules: Rules) -> list[float]:
    """When the backbone has ended each of some consecutive steps, in seconds since the first began.

    Backbone ranks begin a step when all of them have ended the one before; encoder ranks when all ranks have.
    Moving features and gradients, planning, loading and optimizers take no time.
    """
    ranks = rules.allocation.ranks
    free = dict.fromkeys({*ranks[BACKBONE], *ranks[ENCODER]}, 0.0)
    found = []
    for plan in plans:
        step = _Step(plan, rules, free)
        step.play()
        backbone = max(step.ended[rank] for rank in ranks[BACKBONE])
        everyone = max(step.ended.values())
        free = {rank: everyone if rank in ranks[ENCODER] else backbone for rank in free}
        found.append(backbone)
    return found


@dataclass
class _Lane:
    """How far a rank's encoder lane is: forwards not begun, and batches between forward and backward."""

    forwards: list[int]
    backwards: list[int] = field(default_factory=list)


class _Step:
    """One step: every rank does what its lanes would do, with the features and gradients known at that time."""

    def __init__(self, plan: StepPlan, rules: Rules, start: dict[int, float]) -> None:
        self._rules = rules
        self._tokens = [[int(plan.sizes.tokens[m].sum()) for m in rank] for rank in plan.microbatches]
        self._patches = [[int(plan.sizes.media_patches[m].sum()) for m in rank] for rank in plan.encoder_batches]
        self._recomputed = recomputed_batches(plan, rules.kept_batches)
        self._needs: dict[Unit, set[Unit]] = {}
        self._readers: dict[Unit, set[Unit]] = {}
        for entry in plan.entries:
            source, reader = (entry.encoder_rank, entry.encoder_batch), (entry.backbone_rank, entry.microbatch)
            self._needs.setdefault(reader, set()).add(source)
            self._readers.setdefault(source, set()).add(reader)
        self._encoded: dict[Unit, float] = {}
        self._trained: dict[Unit, float] = {}
        self._next = [0] * len(self._tokens)
        self._lanes = [_Lane([n for n, media in enumerate(rank) if len(media)]) for rank in plan.encoder_batches]
        self._batches = sum(len(lane.forwards) for lane in self._lanes)
        self._wakes = [(time, rank) for rank, time in start.items()]
        self._busy_until = dict(start)
        self.ended = dict(start)

    def play(self) -> None:
        """Run the step to its end."""
        heapq.heapify(self._wakes)
        while self._wakes:
            now, rank = heapq.heappop(self._wakes)
            if now < self._busy_until[rank]:
                continue
            seconds = self._turn(rank, now)
            if seconds is None:
                continue
            self._busy_until[rank] = self.ended[rank] = now + seconds
            # Whatever this rank has done may be what another one waits for.
            for other in self._busy_until:
                heapq.heappush(self._wakes, (max(now + seconds, self._busy_until[other]), other))

    def _turn(self, rank: int, now: float) -> float | None:
        """Let a rank do one unit of work, the backbone's first; how long it takes, or None where it must wait."""
        ranks = self._rules.allocation.ranks
        seconds = None
        if rank in ranks[BACKBONE]:
            seconds = self._microbatch(ranks[BACKBONE].index(rank), now)
        if seconds is None and rank in ranks[ENCODER]:
            seconds = self._encode(ranks[ENCODER].index(rank), now)
        return seconds

    def _microbatch(self, rank: int, now: float) -> float | None:
        number = self._next[rank]
        if number == len(self._tokens[rank]):
            return None
        encoded = [self._encoded.get(unit, now + 1) <= now for unit in self._needs.get((rank, number), ())]
        if not all(encoded) or (self._rules.encoder_first and not self._all_encoded(now)):
            return None
        seconds = sum(self._rules.cost.backbone(self._tokens[rank][number]))
        self._next[rank] += 1
        self._trained[rank, number] = now + seconds
        return seconds

    def _encode(self, rank: int, now: float) -> float | None:
        lane, recomputed, kept_batches = self._lanes[rank], self._recomputed[rank], self._rules.kept_batches
        kept = sum(number not in recomputed for number in lane.backwards)
        if lane.forwards and (lane.forwards[0] in recomputed or kept < kept_batches):
            number = lane.forwards.pop(0)
            lane.backwards.append(number)
            seconds = self._rules.cost.encoder(self._patches[rank][number])[0]
            self._encoded[rank, number] = now + seconds
            return seconds
        if lane.backwards and self._has_gradients(rank, lane.backwards[0], now):
            number = lane.backwards.pop(0)
            forward, backward = self._rules.cost.encoder(self._patches[rank][number])
            return backward + (forward if number in recomputed else 0.0)
        return None

    def _has_gradients(self, rank: int, number: int, now: float) -> bool:
        return all(self._trained.get(unit, now + 1) <= now for unit in self._readers[rank, number])

    def _all_encoded(self, now: float) -> bool:
        return len(self._encoded) == self._batches and all(end <= now for end in self._encoded.values())
