"""A device that computes after the host has gone on, and measures time by a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass


class LateDevice:
    """One stream, whose work takes as long as is said; and a host whose time passes only where a test lets it.

    Args:
        rate: seconds that the device's clock counts in a second of the host's.

    Attributes:
        host: seconds of the host's clock.
        waits: how often the host waited for the device.
    """

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate
        self.host = 1000.0
        self.waits = 0
        self.idle_from = 0.0  # when all that was given is done

    def host_clock(self) -> float:
        return self.host

    def give(self, seconds: float) -> None:
        """Work of so many seconds, which begins when what was given before is done."""
        self.idle_from = max(self.idle_from, self.host) + seconds

    def record(self) -> LateEvent:
        return LateEvent(self, max(self.idle_from, self.host))


@dataclass
class LateEvent:
    """The end of what the device was given so far; ``comes`` is when, by the host's clock."""

    device: LateDevice
    comes: float

    def query(self) -> bool:
        return self.device.host >= self.comes

    def elapsed_time(self, end_event: LateEvent) -> float:
        assert self.query(), "CUDA refuses events that have not come"
        assert end_event.query(), "CUDA refuses events that have not come"
        return 1e3 * self.device.rate * (end_event.comes - self.comes)

    def synchronize(self) -> None:
        self.device.waits += not self.query()
        self.device.host = max(self.device.host, self.comes)
