"""What a rank spends its time on and what its part of the pool does, since it was asked last."""

from __future__ import annotations

import time

from flowtrain_lightning.pool import PoolCounters
from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE, STALL, Timeline

Figures = dict[str, float]
"""Name -> figure."""


class RankMetricsTaker:
    """Takes the figures of one rank, each time those since the last.

    Args:
        lanes: role -> what this rank is in it, such as ``"encoder 1"``.
        label: what this rank is in all its roles.
        timeline: of this rank.
    """

    def __init__(self, lanes: dict[str, str], label: str, timeline: Timeline) -> None:
        self._lanes = lanes
        self._label = label
        self._timeline = timeline
        self._totals = dict(timeline.totals)
        self._counters: PoolCounters | None = None
        self._taken = time.monotonic()

    def take(self, counters: PoolCounters | None) -> Figures:
        """The figures since the last call.

        Args:
            counters: of this rank's part of the pool; None where there is none yet.

        Returns:
            for every lane the shares of ``compute``, ``stall`` and ``communication`` in its time, from 0 to 1; for the
            rank ``pool_put`` and ``pool_read`` in bytes per second, ``pool_waiting``, the share of time in which it
            waited for something to come through the pool, ``pool_refused``, how often an entry found no room, and
            ``pool_peak``, the share of its room that was taken at most since the pool was opened.
        """
        now = time.monotonic()
        elapsed, self._taken = now - self._taken, now
        figures = self._shares()
        if counters is not None:
            figures |= self._of_pool(counters, elapsed)
        return figures

    def _shares(self) -> Figures:
        totals = dict(self._timeline.totals)
        figures: Figures = {}
        for role, lane in self._lanes.items():
            spent = {
                kind: totals.get((role, kind), 0.0) - self._totals.get((role, kind), 0.0)
                for kind in (COMPUTE, STALL, COMMUNICATION)
            }
            whole = sum(spent.values())
            figures |= {f"{lane}/{kind}": seconds / whole if whole else 0.0 for kind, seconds in spent.items()}
        self._totals = totals
        return figures

    def _of_pool(self, counters: PoolCounters, elapsed: float) -> Figures:
        former, self._counters = self._counters, counters
        if former is None or counters.entries < former.entries or counters.waits < former.waits:  # it was opened anew
            put = read = refused = 0
            waited = 0.0
        else:
            put, read, refused = former.bytes, former.leased_bytes, former.refused
            waited = former.wait_seconds
        room = counters.current.capacity + counters.ahead.capacity
        taken = {
            "put": (counters.bytes - put) / elapsed,
            "read": (counters.leased_bytes - read) / elapsed,
            "waiting": (counters.wait_seconds - waited) / elapsed,
            "refused": counters.refused - refused,
            "peak": (counters.current.peak + counters.ahead.peak) / room if room else 0.0,
        }
        return {f"{self._label}/pool_{name}": float(figure) for name, figure in taken.items()}
