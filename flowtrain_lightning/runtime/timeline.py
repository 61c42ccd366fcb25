"""Times of each lane by the clock of its device: spans for pictures, totals for progress bars and reports."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from flowtrain_lightning.pool import PoolCounters

COMPUTE = "compute"
STALL = "stall"
COMMUNICATION = "communication"

AGAIN, MOVED = "forward again", "forward moved"
"""Names of a forward that runs a second time, since nothing was kept of it; and of one whose activations have left for
host memory."""

_new = tuple.__new__  # half the time of a call of the class, where it is made for every span
KEPT_SPANS = 20_000  # of some 200 bytes each: 4 MB, which fill up in the first few thousand steps


class TimedEvent(Protocol):
    """A point in a stream's work, as `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one, by the device's own clock."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has come to it."""
        ...


class Mark(NamedTuple):
    """A point in the work of a device.

    Attributes:
        given: when the host came to it: seconds of ``time.monotonic()``.
        event: when the device does; None on a CPU, which does at once what it is given.
    """

    given: float
    event: TimedEvent | None


class DeviceClock:
    """Tells device time as seconds of ``time.monotonic()``, the one clock of all processes of a node.

    How long something took is what the device itself has measured. When it was, the host can only bound: not before it
    gave the work, and not after it saw it done. So the clock takes the device for idle when it is made, and is set
    right by every mark that would lie outside of its bounds. By that it follows a device whose clock runs otherwise.

    Args:
        record: makes an event at the end of what the current stream was given; None on a CPU.
        now: the host's clock.
    """

    def __init__(self, record: Callable[[], TimedEvent] | None = None, now: Callable[[], float] = time.monotonic):
        self._record = record
        self._now = now
        self._known = self.mark()  # the one that was read last, and when it was

    @classmethod
    def of(cls, device: torch.device) -> DeviceClock:
        """The clock of a device."""
        return cls(_cuda_event if device.type == "cuda" else None)

    def mark(self) -> Mark:
        """A mark at the end of what the current stream was given so far."""
        return _new(Mark, (self._now(), None if self._record is None else self._record()))

    def read(self, start: Mark, end: Mark, *, wait: bool = False) -> tuple[float, float] | None:
        """When the device came to two marks of one stream.

        Args:
            start: the earlier one.
            end: the later one.
            wait: for the device, where it has not come to ``end`` yet.

        Returns:
            seconds of both; None where the device has not come to ``end`` yet.
        """
        known, at = self._known.event, self._known.given
        if known is None or start.event is None or end.event is None:
            return start.given, end.given
        if wait:
            known.synchronize()
            end.event.synchronize()
        elif not (known.query() and end.event.query()):
            return None
        came = at + known.elapsed_time(end.event) / 1e3
        came = min(max(came, end.given), self._now())
        self._known = Mark(came, end.event)
        return came - start.event.elapsed_time(end.event) / 1e3, came


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

    Attributes:
        start: begins a span, which `stop` ends and records; on a GPU both on the stream that is current.
    """

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self._clock = clock or DeviceClock()
        self.start: Callable[[], Mark] = self._clock.mark
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)
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
            self.add(_new(Span, work + times))

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


def _cuda_event() -> TimedEvent:
    event: TimedEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()  # type: ignore[attr-defined]
    return event
