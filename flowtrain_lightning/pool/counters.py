"""What a rank's part of the pool has done so far, for monitors and logs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

WAIT_LIMITS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1, 1.0)
"""Seconds: the upper bounds of the buckets into which waits are counted."""


@dataclass(frozen=True)
class Occupancy:
    """Bytes of one part of a segment, headers and alignment included: taken now, at most so far, and in all."""

    now: int
    peak: int
    capacity: int


class Waits:
    """Counts waits, and how long they took.

    Attributes:
        count: how many.
        seconds: of all together.
        histogram: see `PoolCounters.wait_histogram`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.histogram = [0] * (len(WAIT_LIMITS) + 1)

    def add(self, seconds: float) -> None:
        """One more has ended."""
        self.count += 1
        self.seconds += seconds
        self.histogram[bisect_right(WAIT_LIMITS, seconds)] += 1


@dataclass(frozen=True)
class PoolCounters:
    """A snapshot of one rank's part of the pool.

    Attributes:
        transport: how entries reach their readers.
        entries: how many were put.
        bytes: room that they took.
        moved_bytes: room of those that other ranks read, counted for each such reader.
        leased_bytes: room of the entries that this rank has leased, own ones among them.
        refused: how often an entry found no room at that moment.
        waits: how often `Pool.poll` was allowed to wait.
        wait_seconds: how long it did so in all.
        wait_histogram: how many of these waits took less than each of `WAIT_LIMITS`, and not less than the one before;
            the last are those that took longer than all of them.
        current: the room of the step that runs.
        ahead: the room of later steps.
        device: room in device memory, of entries whose readers have not all given them back.
    """

    transport: str
    entries: int
    bytes: int
    moved_bytes: int
    leased_bytes: int
    refused: int
    waits: int
    wait_seconds: float
    wait_histogram: tuple[int, ...]
    current: Occupancy
    ahead: Occupancy
    device: Occupancy = Occupancy(0, 0, 0)
