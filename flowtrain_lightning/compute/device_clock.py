"""When a device came to something, told later and without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

_new = tuple.__new__  # half the time of a call of the class, where it is made twice for every span


class TimedEvent(Protocol):
    """What `torch.cuda.Event` offers of a point in the work that a stream was given."""

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


def _cuda_event() -> TimedEvent:
    event: TimedEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()  # type: ignore[attr-defined]
    return event
