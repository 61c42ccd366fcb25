"""Timelines of all ranks as Chrome trace events, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from flowtrain_lightning.runtime.timeline import COMMUNICATION, Span


def write_trace(timelines: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes one file with a process for every rank and a track for every lane.

    Args:
        timelines: of all ranks, see `read_timelines`.
        path: the JSON to write. Its times are microseconds since the first span of any rank, by wall clock where ranks
            are on several nodes.
    """
    first = min((timeline["clock"] + span[-2] for timeline in timelines for span in timeline["spans"]), default=0.0)
    events = [event for timeline in timelines for event in _events(timeline, first)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _events(timeline: dict[str, Any], first: float) -> list[dict[str, Any]]:
    """One rank's."""
    rank, ends = timeline["rank"], dict[str, float]()
    events: list[dict[str, Any]] = []
    for span in sorted((Span(*span) for span in timeline["spans"]), key=lambda span: span.start):
        track = _track(span, ends)
        ends[track] = span.end
        number = "" if span.number < 0 else f" {span.number}"
        events.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": list(ends).index(track),
                "ts": 1e6 * (timeline["clock"] + span.start - first),
                "dur": 1e6 * (span.end - span.start),
                "name": f"{span.name}{number}",
                "cat": span.kind,
                "args": {"stage": span.stage, "step": span.step},
            }
        )
    names = [("process_name", 0, f"rank {rank}: {timeline['label']}")]
    names += [("thread_name", number, track) for number, track in enumerate(ends)]
    named = [{"ph": "M", "pid": rank, "tid": tid, "name": kind, "args": {"name": name}} for kind, tid, name in names]
    return [*named, *events]


def _track(span: Span, ends: dict[str, float]) -> str:
    """The lane's, or one beside it where copies go on while the lane computes: what overlaps cannot share a track."""
    own = f"{span.lane}: {span.kind}" if span.kind == COMMUNICATION else span.lane
    tracks = (own if number == 1 else f"{own} {number}" for number in count(1))
    return next(track for track in tracks if ends.get(track, span.start) <= span.start)
