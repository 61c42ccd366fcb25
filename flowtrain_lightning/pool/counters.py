"""Counters of a rank's part of the pool, for monitors and logs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

WAIT_LIMITS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1, 1.0)
"""Seconds: the upper bounds of the buckets into which waits are counted."""


@dataclass(frozen=True)
class Occupancy:
    """Bytes of a memory region, headers and alignment included: taken now, at most so far, and in all."""

    now: int
    peak: int
    capacity: int


@dataclass(frozen=True)
class PoolCounters:
    """A snapshot of one rank's part of the pool. Bytes of entries include headers and alignment.

    Attributes:
        transport: how entries reach their readers.
        entries: how many were put.
        bytes: of the entries that were put.
        moved_bytes: of those that other ranks read, counted for each such reader.
        leased_bytes: of the entries that this rank has leased, own ones among them.
        refused: how often an entry did not fit at that moment.
        waits: how often `Pool.poll` was allowed to wait.
        wait_seconds: how long it did so in all.
        wait_histogram: how many of these waits took less than each of `WAIT_LIMITS`, and not less than the one before;
            the last are those that took longer than all of them.
        current: the region of the step that runs.
        ahead: the region of later steps.
        device: device memory of entries whose readers have not all given them back.
        fallbacks: entries of tensors on the device that were put into host memory all the same, since the block was
            full or one of their readers cannot read it.
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
    fallbacks: int = 0


@dataclass
class PoolTally:
    """What a rank's part of the pool counts itself, by the names of `PoolCounters`."""

    entries: int = 0
    bytes: int = 0
    moved_bytes: int = 0
    leased_bytes: int = 0
    refused: int = 0
    wait_seconds: float = 0.0
    wait_histogram: list[int] = field(default_factory=lambda: [0] * (len(WAIT_LIMITS) + 1))

    def put(self, nbytes: int) -> None:
        """Count an entry of so many bytes."""
        self.entries += 1
        self.bytes += nbytes

    def waited(self, seconds: float) -> None:
        """Count a wait of so many seconds."""
        self.wait_seconds += seconds
        self.wait_histogram[bisect_right(WAIT_LIMITS, seconds)] += 1

    def counters(
        self, transport: str, current: Occupancy, ahead: Occupancy, device: Occupancy, fallbacks: int
    ) -> PoolCounters:
        """A snapshot, with what the memory says for itself; see `PoolCounters`."""
        return PoolCounters(
            transport=transport,
            entries=self.entries,
            bytes=self.bytes,
            moved_bytes=self.moved_bytes,
            leased_bytes=self.leased_bytes,
            refused=self.refused,
            waits=sum(self.wait_histogram),
            wait_seconds=self.wait_seconds,
            wait_histogram=tuple(self.wait_histogram),
            current=current,
            ahead=ahead,
            device=device,
            fallbacks=fallbacks,
        )
