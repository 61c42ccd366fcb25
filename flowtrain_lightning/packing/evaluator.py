"""How long a step takes, from who encodes and reads what: a simulation of the lanes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain_lightning.packing.cost import CostModel
from flowtrain_lightning.packing.plan import StepPlan

FORWARD_SHARE = 1 / 3
"""The forward's share of what an encoder batch costs when the encoder trains: a backward is two forwards."""


@dataclass(frozen=True)
class EncoderWork:
    """One encoder batch.

    Attributes:
        forward: time of its forward.
        backward: time of its backward; 0 where the encoder does not train.
        readers: ``(backbone rank, position)`` of the microbatches that read it.
    """

    forward: float
    backward: float
    readers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StepTime:
    """What a step takes.

    Attributes:
        makespan: time from its begin until the last lane is done.
        work: time that the busiest lane computes; with both lanes on one rank, that the busiest rank computes.
    """

    makespan: float
    work: float

    @property
    def flow_gap(self) -> float:
        """By how much the step is longer than the work of its busiest lane, as a share of that work."""
        return self.makespan / self.work - 1 if self.work else 0.0


def step_time(
    microbatches: Sequence[Sequence[float]],
    encoder_batches: Sequence[Sequence[EncoderWork]],
    *,
    meet: bool,
    kept: int | None = None,
    colocated: bool = False,
) -> StepTime:
    """Simulate one step.

    Encoder lanes run forwards in their order while they may keep activations, and backwards in the same order as
    soon as the gradients of all readers are there. Backbone lanes run their microbatches in order, each when its
    features are there.

    Args:
        microbatches: ``[backbone rank][position]`` time of forward and backward together.
        encoder_batches: ``[encoder rank][number]``.
        meet: backbone ranks begin each microbatch together.
        kept: encoder batches per rank whose activations may be kept, at least 1; None sets no limit.
        colocated: encoder rank ``r`` is backbone rank ``r``: it does one thing at a time, the backbone's first.

    Raises:
        ValueError: no lane can go on, since ``kept`` is too small for this order.
    """
    simulation = _Simulation(microbatches, encoder_batches, meet, kept, colocated)
    makespan = simulation.run()
    reading = [sum(of_rank) for of_rank in microbatches]
    encoding = [sum(batch.forward + batch.backward for batch in of_rank) for of_rank in encoder_batches]
    if colocated:
        work = max(map(sum, zip(reading, encoding, strict=True)), default=0.0)
    else:
        work = max([*reading, *encoding], default=0.0)
    return StepTime(makespan, work)


def plan_time(
    plan: StepPlan,
    cost: CostModel,
    encoder_cost: CostModel,
    *,
    meet: bool,
    trains: bool = True,
    kept: int | None = None,
    colocated: bool = False,
) -> StepTime:
    """Simulate a step plan.

    Args:
        plan: who encodes and who reads what.
        cost: forward and backward of a microbatch.
        encoder_cost: forward and backward of an encoder batch, by its media's patches.
        meet: backbone ranks begin each microbatch together.
        trains: the encoder has a backward; without one its forward is a third of ``encoder_cost``.
        kept: see :func:`step_time`.
        colocated: see :func:`step_time`.
    """
    readers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for entry in plan.entries:
        readers.setdefault((entry.encoder_rank, entry.encoder_batch), []).append(
            (entry.backbone_rank, entry.microbatch)
        )
    encoder = []
    for rank, batches in enumerate(plan.encoder_batches):
        works = []
        for number, media in enumerate(batches):
            total = encoder_cost.of_set(plan.sizes.media_patches[media]) if len(media) else 0.0
            backward = total * (1 - FORWARD_SHARE) if trains else 0.0
            works.append(EncoderWork(total * FORWARD_SHARE, backward, tuple(readers.get((rank, number), ()))))
        encoder.append(works)
    microbatches = [[cost.of_set(plan.sizes.tokens[m]) if len(m) else 0.0 for m in rank] for rank in plan.microbatches]
    return step_time(microbatches, encoder, meet=meet, kept=kept, colocated=colocated)


class _Simulation:
    def __init__(
        self,
        microbatches: Sequence[Sequence[float]],
        encoder_batches: Sequence[Sequence[EncoderWork]],
        meet: bool,
        kept: int | None,
        colocated: bool,
    ) -> None:
        self.microbatches = microbatches
        self.batches = encoder_batches
        self.meet = meet
        self.kept = kept
        self.offset = 0 if colocated else len(microbatches)
        self.missing = [[0] * len(of_rank) for of_rank in microbatches]
        self.unread = [[len(batch.readers) for batch in of_rank] for of_rank in encoder_batches]
        self.sources: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, of_rank in enumerate(encoder_batches):
            for number, batch in enumerate(of_rank):
                for reader in batch.readers:
                    self.missing[reader[0]][reader[1]] += 1
                    self.sources.setdefault(reader, []).append((rank, number))
        self.position = [0] * len(microbatches)
        self.forwards = [0] * len(encoder_batches)
        self.backwards = [0] * len(encoder_batches)
        self.busy = [False] * max(len(microbatches), self.offset + len(encoder_batches))
        self.running: list[tuple[float, int, str, int, int]] = []  # a heap: end, worker, kind, rank, number

    def run(self) -> float:
        now = 0.0
        while True:
            self._start(now)
            if not self.running:
                break
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                self._finish(*heapq.heappop(self.running)[1:])
        if any(done < len(of_rank) for done, of_rank in zip(self.position, self.microbatches, strict=True)):
            raise ValueError(f"kept={self.kept} keeps too few encoder batches for this order; allow more.")
        return now

    def _start(self, now: float) -> None:
        ready = [rank for rank in range(len(self.microbatches)) if self._may_read(rank)]
        waiting = [rank for rank, done in enumerate(self.position) if done < len(self.microbatches[rank])]
        if not self.meet or ready == waiting:
            for rank in ready:
                number = self.position[rank]
                self._occupy(rank, now + self.microbatches[rank][number], "read", rank, number)
        for rank, of_rank in enumerate(self.batches):
            worker = self.offset + rank
            if self.busy[worker]:
                continue
            number, first = self.forwards[rank], self.backwards[rank]
            if number < len(of_rank) and (self.kept is None or number - first < self.kept):
                self._occupy(worker, now + of_rank[number].forward, "forward", rank, number)
            elif first < number and self.unread[rank][first] == 0:
                self._occupy(worker, now + of_rank[first].backward, "backward", rank, first)

    def _may_read(self, rank: int) -> bool:
        number = self.position[rank]
        return not self.busy[rank] and number < len(self.microbatches[rank]) and self.missing[rank][number] == 0

    def _occupy(self, worker: int, end: float, kind: str, rank: int, number: int) -> None:
        self.busy[worker] = True
        heapq.heappush(self.running, (end, worker, kind, rank, number))

    def _finish(self, worker: int, kind: str, rank: int, number: int) -> None:
        self.busy[worker] = False
        if kind == "read":
            self.position[rank] += 1
            for source, batch in self.sources.get((rank, number), ()):
                self.unread[source][batch] -= 1
        elif kind == "forward":
            self.forwards[rank] += 1
            for reader, position in self.batches[rank][number].readers:
                self.missing[reader][position] -= 1
        else:
            self.backwards[rank] += 1
