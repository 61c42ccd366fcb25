"""What a rank's part of the pool has done so far, for monitors and logs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Occupancy:
    """Bytes of one arena, headers and alignment included: taken now, at most so far, and in all."""

    now: int
    peak: int
    capacity: int


@dataclass(frozen=True)
class PoolCounters:
    """A snapshot of one rank's part of the pool.

    Attributes:
        transport: how entries reach their readers.
        entries: how many were put.
        bytes: room that they took.
        refused: how often an entry found no room at that moment.
        waits: how often `Pool.poll` was allowed to wait.
        wait_seconds: how long it did so in all.
        current: the arena of the step that runs.
        ahead: the arena of later steps.
    """

    transport: str
    entries: int
    bytes: int
    refused: int
    waits: int
    wait_seconds: float
    current: Occupancy
    ahead: Occupancy
