"""What each lane did when: spans for pictures, totals for progress bars and reports."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from flowtrain_lightning.pool import PoolCounters

COMPUTE = "compute"
STALL = "stall"
COMMUNICATION = "communication"

_KEPT_SPANS = 20_000


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


class Timeline:
    """The spans of one rank: the latest ones whole, all of them as totals."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=_KEPT_SPANS)
        self.totals: dict[tuple[str, str], float] = defaultdict(float)

    def start(self) -> float:
        """Begins a span, which `stop` ends and records."""
        return time.monotonic()

    def stop(self, start: float, lane: str, kind: str, name: str, stage: str, step: int, number: int = -1) -> None:
        """Records what a lane did since ``start``; see `Span`."""
        self.add(Span(lane, kind, name, stage, step, number, start, time.monotonic()))

    def add(self, span: Span) -> None:
        """Records a span that was timed elsewhere."""
        self.spans.append(span)
        self.totals[span.lane, span.kind] += span.end - span.start

    def share(self, lane: str, kind: str) -> float:
        """The share of ``kind`` in all the recorded time of ``lane``, from 0 to 1."""
        whole = sum(seconds for (name, _), seconds in self.totals.items() if name == lane)
        return self.totals[lane, kind] / whole if whole else 0.0

    def save(self, path: Path, rank: int, label: str, pool: PoolCounters | None = None) -> None:
        """Writes spans, totals and what the rank's part of the pool has done as JSON."""
        totals: dict[str, dict[str, float]] = defaultdict(dict)
        for (lane, kind), seconds in self.totals.items():
            totals[lane][kind] = seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        counters = None if pool is None else asdict(pool)
        told = {"rank": rank, "label": label, "totals": totals, "pool": counters, "spans": list(self.spans)}
        path.write_text(json.dumps(told))
