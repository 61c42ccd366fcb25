"""What lanes have in common, and how the one or two lanes of a rank take turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.pool import Pool, StatusPage
from flowtrain_lightning.runtime.step import Step
from flowtrain_lightning.runtime.timeline import STALL, Span, Timeline

Schedule = Iterator[str | None]
"""A lane at work: each turn is one unit of work (None), or what the lane waits for (a text)."""

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class LaneContext:
    """What a lane works with.

    Attributes:
        pool: where features and gradients pass.
        compute: runs the user's methods.
        page: tells the other ranks what this one is doing.
        timeline: records what was done when.
    """

    pool: Pool
    compute: Compute
    page: StatusPage
    timeline: Timeline

    def enter(self, phase: str, step: Step) -> None:
        """Tells the other ranks what this one does from now on.

        Args:
            phase: a few words; begins with ``"wait"`` where the rank only waits for others.
            step: the step that it belongs to.
        """
        self.page.enter(step.phase(phase), step.index)


def run_schedule(desk: LaneContext, lanes: Sequence[tuple[str, Schedule]], step: Step) -> None:
    """Runs the lanes of this rank to their end, in one thread.

    After every unit of work the first lane is asked again, so it has precedence. Where no lane can move, the rank
    sleeps until something arrives from another rank.

    Args:
        desk: what the lanes work with.
        lanes: role and lane, in order of precedence.
        step: the step that runs.
    """
    running = dict(lanes)
    while running:
        desk.pool.poll()
        reasons: list[str] = []
        for role, turns in list(running.items()):
            reason = next(turns, _END)
            if reason is _END:
                del running[role]
            if not isinstance(reason, str):
                break
            reasons.append(reason)
        else:
            _sleep(desk, next(iter(running)), reasons, step)


def _sleep(desk: LaneContext, role: str, reasons: list[str], step: Step) -> None:
    reason = " and ".join(reasons)
    desk.enter(f"wait for {reason}", step)
    start = time.monotonic()
    while not desk.pool.poll(_POLL_SECONDS):
        pass
    desk.timeline.add(Span(role, STALL, reasons[0], *step.place, -1, start, time.monotonic()))


_END = object()
