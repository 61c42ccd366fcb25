"""What each lane did when: spans for pictures, totals for progress bars and reports."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from flowtrain_lightning.compute.device_clock import DeviceClock, Mark
from flowtrain_lightning.pool import PoolCounters

COMPUTE = "compute"
STALL = "stall"
COMMUNICATION = "communication"

_KEPT_SPANS = 20_000  # of some 200 bytes each: 4 MB, which fill up in the first few thousand steps


class Span(NamedTuple):
    """One stretch of a lane's time.

    Attributes:
        lane: the role whose lane it is.
        kind: ``compute``, ``stall`` or ``communication``.
        name: what was done, for example ``forward`` or ``wait for features``.
        stage: ``train``, ``val``, ``test`` or ``predict``.
        step: the step's number within its stage, since the start of the run.
        number: microbatch or encoder batch, -1 where neither fits.
        start: seconds of ``time.monotonic()``, one clock for all processes of a node.
        end: when it was over, on the same clock.
    """

    lane: str
    kind: str
    name: str
    stage: str
    step: int
    number: int
    start: float
    end: float


_Work = tuple[str, str, str, str, int, int]
"""A span without its times: lane, kind, name, stage, step and number."""


class Timeline:
    """The spans of one rank: the latest ones whole, all of them as totals.

    Times are those of the device that computes. A GPU comes to its work long after the host, which does not wait for
    it; so a span counts from when the GPU has come to its end, and in the order in which spans were given. Who runs
    the steps settles the timeline once a step, and so bounds what it keeps.

    Args:
        clock: of that device; by default a CPU's.
    """

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self._clock = clock or DeviceClock()
        self._spans: deque[Span] = deque(maxlen=_KEPT_SPANS)
        self._totals: dict[tuple[str, str], float] = defaultdict(float)
        self._coming: deque[tuple[_Work, Mark, Mark]] = deque()

    @property
    def spans(self) -> Sequence[Span]:
        """The latest spans that are over."""
        self.settle()
        return self._spans

    @property
    def totals(self) -> Mapping[tuple[str, str], float]:
        """Lane and kind -> seconds of all spans that are over."""
        self.settle()
        return self._totals

    def start(self) -> Mark:
        """Begins a span, which `stop` ends and records; on a GPU both on the stream that is current."""
        return self._clock.mark()

    def stop(self, start: Mark, lane: str, kind: str, name: str, stage: str, step: int, number: int = -1) -> None:
        """Records what a lane did since ``start``; see `Span`."""
        self._coming.append(((lane, kind, name, stage, step, number), start, self._clock.mark()))

    def add(self, span: Span) -> None:
        """Records a span that was timed elsewhere."""
        self._spans.append(span)
        self._totals[span.lane, span.kind] += span.end - span.start

    def settle(self, *, wait: bool = False) -> None:
        """Takes in the spans that the device has come to; with ``wait``, all of them."""
        while self._coming:
            work, start, end = self._coming[0]
            times = self._clock.read(start, end, wait=wait)
            if times is None:
                return
            self._coming.popleft()
            self.add(Span(*work, *times))

    def is_settled(self, stage: str, step: int) -> bool:
        """Whether the device has come to the end of all that was recorded of a step."""
        self.settle()
        return all((of_stage, of_step) != (stage, step) for (_, _, _, of_stage, of_step, _), _, _ in self._coming)

    def share(self, lane: str, kind: str) -> float:
        """The share of ``kind`` in all the recorded time of ``lane``, from 0 to 1."""
        totals = self.totals
        whole = sum(seconds for (name, _), seconds in totals.items() if name == lane)
        return totals.get((lane, kind), 0.0) / whole if whole else 0.0

    def save(self, path: Path, rank: int, label: str, pool: PoolCounters | None = None) -> None:
        """Waits for the device, and writes spans, totals and what the rank's part of the pool has done as JSON."""
        self.settle(wait=True)
        totals: dict[str, dict[str, float]] = defaultdict(dict)
        for (lane, kind), seconds in self._totals.items():
            totals[lane][kind] = seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        counters = None if pool is None else asdict(pool)
        told = {
            "rank": rank,
            "label": label,
            "clock": time.time() - time.monotonic(),  # what makes spans of several nodes comparable
            "totals": totals,
            "pool": counters,
            "spans": list(self._spans),
        }
        path.write_text(json.dumps(told))
