"""Writes what every lane did when, as files and as a trace, and draws one step of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from textwrap import fill
from typing import Any

import lightning as L

from flowtrain_lightning.runtime.timeline import COMMUNICATION, COMPUTE, Span
from flowtrain_lightning.strategy import FlowTrainStrategy

COLOURS = {
    "forward": "#2a78d6",
    "forward again": "#7fb0ea",
    "forward moved": "#3f9aa8",
    "backward": "#104281",
    "weights": "#5b7fb5",
    "communication": "#e8a33d",
    "stall": "#e3e3e0",
}

DRAWN_RANKS = 8
"""Ranks of each role in the picture of a step."""


class TimelineRecorder(L.Callback):
    """Saves ``timeline/rank<r>.json`` of every rank, and a trace and a picture of all together, when ``fit`` ends.

    ``timeline/trace.json`` opens in Perfetto (https://ui.perfetto.dev); ``timeline.png`` shows one step. On GPUs both
    tell device time.

    Args:
        folder: where to write; by default the logger's folder.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the files; rank 0 draws."""
        strategy = trainer.strategy
        if not isinstance(strategy, FlowTrainStrategy):
            return
        folder = Path(strategy.broadcast(str(self.folder or trainer.log_dir or trainer.default_root_dir)))
        rank = trainer.global_rank
        runner, path = strategy.runner, folder / "timeline" / f"rank{rank}.json"
        runner.timeline.save(path, rank, strategy.job.labels[rank], runner.pool_counters)
        strategy.barrier()
        if trainer.is_global_zero:
            _remove_others(folder / "timeline", trainer.world_size)
            timelines = read_timelines(folder / "timeline")
            write_trace(timelines, folder / "timeline" / "trace.json")
            draw_step(timelines, folder / "timeline.png")


def _remove_others(folder: Path, ranks: int) -> None:
    """Removes what an earlier run of more ranks has saved there."""
    for timeline in read_timelines(folder):
        if timeline["rank"] >= ranks:
            (folder / f"rank{timeline['rank']}.json").unlink()


def read_timelines(folder: Path) -> list[dict[str, Any]]:
    """Reads what ranks saved, in order: ``rank``, ``label``, ``totals`` (role -> kind -> seconds), ``spans``, ``pool``.

    With ``clock`` added, the times of spans are wall clock time. ``pool`` has the fields of `PoolCounters`; None
    where the rank never opened a pool.
    """
    timelines = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    return sorted(timelines, key=lambda timeline: int(timeline["rank"]))


def time_split(timelines: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Role -> kind (compute, stall, communication) -> its share of all recorded time of that role's lanes."""
    seconds: dict[str, dict[str, float]] = {}
    for timeline in timelines:
        for role, kinds in timeline["totals"].items():
            for kind, spent in kinds.items():
                seconds.setdefault(role, {}).setdefault(kind, 0.0)
                seconds[role][kind] += spent
    return {role: {kind: s / sum(kinds.values()) for kind, s in kinds.items()} for role, kinds in seconds.items()}


def draw_step(timelines: Sequence[dict[str, Any]], path: Path, ranks: int | None = None) -> None:
    """Draws one training step, in the middle of those that were kept: a row per lane, a bar per span.

    Of each role the first `DRAWN_RANKS` are drawn; the title says of how many.

    Args:
        timelines: see ``read_timelines``.
        path: the PNG to write.
        ranks: of the run, where ``timelines`` are of some of them.
    """
    step = _middle_step(timelines)
    if step is None:
        return
    shown, ranks = _first_ranks(timelines), len(timelines) if ranks is None else ranks
    some = f" ({len(shown)} of {ranks} ranks)" if ranks > len(shown) else ""
    draw_steps({f"Step {step}: what each lane did when{some}": (shown, step)}, path)


def _first_ranks(timelines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    drawn = Counter[str]()
    for timeline in timelines:
        roles = {span.lane for _, span in _training_spans([timeline])}
        if any(drawn[role] < DRAWN_RANKS for role in roles):
            shown.append(timeline)
            drawn.update(roles)
    return shown


def draw_steps(steps: Mapping[str, tuple[Sequence[dict[str, Any]], int | None]], path: Path) -> None:
    """Draws training steps of several runs above each other, on one scale of time.

    Args:
        steps: title -> timelines, see ``read_timelines``, and which step of them; None for one in the middle.
        path: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [len(_lanes(timelines)) for timelines, _ in steps.values()]
    figure = Figure(figsize=(11, 0.8 + 0.6 * sum(rows) + 0.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    for axes, (title, (timelines, step)) in zip(panels, steps.items(), strict=True):
        _draw_lanes(axes, timelines, _middle_step(timelines) if step is None else step)
        axes.set_title(fill(title, 110), loc="left")
    panels[-1].set_xlabel("milliseconds since the step began")
    drawn = {_colour_name(span) for timelines, _ in steps.values() for _, span in _training_spans(timelines)}
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in drawn]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(COLOURS), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _draw_lanes(axes: Any, timelines: Sequence[dict[str, Any]], step: int | None) -> None:
    lanes = _lanes(timelines)
    shown = [(label, span) for label, span in _training_spans(timelines) if span.step == step]
    origin = min((span.start for _, span in shown), default=0.0)
    for label, span in shown:
        axes.barh(
            lanes.index((label, span.lane)),
            (span.end - span.start) * 1e3,
            left=(span.start - origin) * 1e3,
            height=0.6,
            color=COLOURS[_colour_name(span)],
            linewidth=0,
        )
    axes.set_yticks(range(len(lanes)), [f"{label}: {lane}" if " and " in label else label for label, lane in lanes])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _colour_name(span: Span) -> str:
    return span.name if span.name in COLOURS else span.kind


def _training_spans(timelines: Sequence[dict[str, Any]]) -> list[tuple[str, Span]]:
    """Label of the rank, and what it did."""
    spans = [(timeline["label"], Span(*span)) for timeline in timelines for span in timeline["spans"]]
    return [(label, span) for label, span in spans if span.stage == "train"]


def _lanes(timelines: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Label of the rank and role of every lane that trained, from below."""
    return sorted({(label, span.lane) for label, span in _training_spans(timelines)}, reverse=True)


def _middle_step(timelines: Sequence[dict[str, Any]]) -> int | None:
    steps = sorted({span.step for _, span in _training_spans(timelines) if span.kind == COMPUTE})
    return steps[len(steps) // 2] if steps else None


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
