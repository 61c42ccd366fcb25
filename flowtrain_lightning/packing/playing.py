"""One step of the lanes, played with a list of events."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowtrain_lightning.packing.evaluator import Lanes, StepWork


@dataclass(frozen=True)
class Stretch:
    """What one rank computes in one piece.

    Attributes:
        step: which of the steps.
        kind: ``"read"`` (a microbatch), ``"forward"`` or ``"backward"`` (of an encoder batch).
        rank: who computes.
        lane: which backbone lane, or which encoder lane.
        number: which microbatch or encoder batch of that lane.
        start: time since the first step's begin.
        end: likewise.
    """

    step: int
    kind: str
    rank: int
    lane: int
    number: int
    start: float
    end: float


class Play:
    """One step: each lane's place in its order, and what the lanes wait for from each other.

    Args:
        work: what there is to compute.
        lanes: who computes.
        start: rank -> when it is free.

    Attributes:
        stretches: what was computed; their step is 0.
    """

    def __init__(self, work: StepWork, lanes: Lanes, start: dict[int, float]) -> None:
        self.microbatches = work.microbatches
        self.batches = work.encoder_batches
        self.lanes = lanes
        self.ended = dict(start)
        self.missing = [[0] * len(of_lane) for of_lane in work.microbatches]  # features, in batches
        self.unread = [[len(batch.readers) for batch in of_lane] for of_lane in work.encoder_batches]
        self.sources: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.unencoded = 0
        for lane, of_lane in enumerate(work.encoder_batches):
            self.unencoded += len(of_lane)
            for number, batch in enumerate(of_lane):
                for reader in batch.readers:
                    self.missing[reader[0]][reader[1]] += 1
                    self.sources.setdefault(reader, []).append((lane, number))
        self.position = [0] * len(work.microbatches)
        self.entered: set[int] = set()  # backbone lanes that wait in a microbatch for the others to come
        self.forwards = [0] * len(work.encoder_batches)
        self.backwards = [0] * len(work.encoder_batches)
        self.kept = [0] * len(work.encoder_batches)
        self.busy = set(start)
        self.stretches: list[Stretch] = []
        # A heap of what runs: its end, the rank, what it is, the lane, and the number of the microbatch or batch.
        self.running = [(time, rank, "begin", -1, -1) for rank, time in start.items()]
        heapq.heapify(self.running)

    def run(self) -> dict[int, float]:
        """When each rank has ended the step.

        Raises:
            ValueError: no lane can go on.
        """
        while self.running:
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                self._finish(*heapq.heappop(self.running))
            self._read(now)
            self._encode(now)
        read = all(done == len(own) for done, own in zip(self.position, self.microbatches, strict=True))
        if not read or any(done < len(own) for done, own in zip(self.backwards, self.batches, strict=True)):
            raise ValueError(
                f"kept={self.lanes.kept} keeps too few encoder batches for this order, or lanes on one rank wait for "
                "each other; allow more, or mark batches as recomputed."
            )
        return self.ended

    def _read(self, now: float) -> None:
        for lane, rank in enumerate(self.lanes.backbone):
            number = self.position[lane]
            if rank in self.busy or number == len(self.microbatches[lane]) or self.missing[lane][number]:
                continue
            if self.lanes.encoder_first and self.unencoded:
                continue
            self.busy.add(rank)
            self.entered.add(lane)
        if self.lanes.meet and len(self.entered) < self._unfinished():
            return
        for lane in sorted(self.entered):
            number = self.position[lane]
            self._occupy(self.lanes.backbone[lane], now, self.microbatches[lane][number], "read", lane, number)
        self.entered.clear()

    def _unfinished(self) -> int:
        return sum(done < len(own) for done, own in zip(self.position, self.microbatches, strict=True))

    def _encode(self, now: float) -> None:
        limit = self.lanes.kept
        for lane, (rank, batches) in enumerate(zip(self.lanes.encoder, self.batches, strict=True)):
            if rank in self.busy:
                continue
            number, first = self.forwards[lane], self.backwards[lane]
            while first < number and batches[first].backward == 0:
                first = self.backwards[lane] = first + 1
            fits = limit is None or self.kept[lane] < limit
            if number < len(batches) and (fits or not batches[number].is_kept):
                self._occupy(rank, now, batches[number].forward, "forward", lane, number)
            elif first < number and self.unread[lane][first] == 0:
                again = batches[first].forward if batches[first].recomputed else 0.0
                self._occupy(rank, now, again + batches[first].backward, "backward", lane, first)

    def _occupy(self, rank: int, now: float, time: float, kind: str, lane: int, number: int) -> None:
        self.busy.add(rank)
        self.stretches.append(Stretch(0, kind, rank, lane, number, now, now + time))
        heapq.heappush(self.running, (now + time, rank, kind, lane, number))

    def _finish(self, now: float, rank: int, kind: str, lane: int, number: int) -> None:
        self.busy.discard(rank)
        self.ended[rank] = now
        if kind == "read":
            self.position[lane] += 1
            for source, batch in self.sources.get((lane, number), ()):
                self.unread[source][batch] -= 1
        elif kind == "forward":
            self.forwards[lane] += 1
            self.unencoded -= 1
            self.kept[lane] += self.batches[lane][number].is_kept
            for reader, position in self.batches[lane][number].readers:
                self.missing[reader][position] -= 1
        elif kind == "backward":
            self.backwards[lane] += 1
            self.kept[lane] -= self.batches[lane][number].is_kept
