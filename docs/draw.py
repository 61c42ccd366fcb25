"""Draws the pictures of architecture.md: the rooms by their imports, and one step as the simulator plays it.

    python docs/draw.py

Both follow from the code alone, so the same code gives the same files to the byte; a test compares them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from html import escape
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from flowtrain_lightning.callbacks.timeline_recorder import COLOURS
from flowtrain_lightning.packing import IntArray, SampleSizes
from flowtrain_lightning.packing.role_graph import BACKBONE, ENCODER, Edge
from flowtrain_lightning.packing.simulator import SimulatedSpan, simulate_steps
from flowtrain_lightning.packing.step_graph import BatchOf, Work
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_planner import plan_step
from flowtrain_lightning.packing.step_work import PassTimes, StepRules, StepWork, in_two_passes, step_work
from tests.test_architecture import FILES, NAME, ROOMS, imports, room_of

DOCS = Path(__file__).parent

Imports = Mapping[str, frozenset[str]]
"""Room -> the other rooms that it imports."""

SHOWN: dict[str, tuple[float, str]] = {
    "packing": (0, "samples to microbatches"),
    "ports": (1, "nobody in too late"),
    "pool": (1, "features and gradients"),
    "allocator": (2, "layouts, memory, time"),
    "attention": (3, "inside of sequences"),
    "data": (0.5, "media items, batches"),
    "parallel": (2, "a layout onto a half"),
    "compute": (1, "one batch, one process"),
    "checkpoint": (2, "by parameter name"),
    "packing_check": (0, "packed equals alone"),
    "module": (1.5, "what a user writes"),
    "runtime": (1, "lanes, steps, health"),
    "models": (3, "of Hugging Face"),
    "placement": (0.5, "who encodes, and why"),
    "trainer": (1.5, "refusals, launching"),
    "strategy": (1, "what Lightning sees"),
    "metrics": (2.5, "MFU, tokens, stalls"),
    "callbacks": (1, "what went where, when"),
    "registration": (2, 'the name "flowtrain"'),
    "cli": (1, "flowtrain plan, fit ..."),
}
"""Room -> its column in the picture, and what it is for."""

WITHOUT_TORCH = ("packing", "allocator")

_INK, _LINE, _GROUND = "#24292f", "#8b8b85", "#ffffff"
_COLUMN, _ROW, _BOX_WIDTH, _BOX_HEIGHT = 190, 78, 164, 44
_LANE, _GAP, _LEFT, _STEP_WIDTH = 40, 22, 110, 860


def main() -> None:
    """Writes both pictures beside this script."""
    for name, picture in pictures().items():
        (DOCS / name).write_text(picture, encoding="utf-8")


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    return {"rooms.svg": draw_rooms(room_imports()), "step.svg": draw_step()}


# ---- the rooms ------------------------------------------------------------------------------------------------------


def room_imports() -> Imports:
    """What every room imports, read from its files."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in FILES:
        names = {name.split(".")[1] for name in imports(file) if name.startswith(f"{NAME}.")}
        found[room_of(file)] |= names & set(ROOMS) - {room_of(file)}
    return {room: frozenset(others) for room, others in found.items()}


def draw_rooms(graph: Imports) -> str:
    """Every room above all that it imports. A line that follows from two others is left out."""
    rows = {room: _height(graph, room) for room in graph}
    top = max(rows.values())
    width = int((max(SHOWN[room][0] for room in graph) + 1) * _COLUMN)

    def corner(room: str) -> tuple[float, float]:
        return SHOWN[room][0] * _COLUMN + (_COLUMN - _BOX_WIDTH) / 2, (top - rows[room]) * _ROW + 16

    shapes = []
    for room in sorted(graph):
        x, y = corner(room)
        for below in sorted(_direct(graph, room)):
            to_x, to_y = corner(below)
            start, end = (x + _BOX_WIDTH / 2, y + _BOX_HEIGHT), (to_x + _BOX_WIDTH / 2, to_y)
            shapes.append(_arrow(start, end, _LINE))
    for room in sorted(graph):
        x, y = corner(room)
        fill = "#e4f4ec" if room in WITHOUT_TORCH else "#e8f0fb"
        shapes.append(_box(x, y, _BOX_WIDTH, _BOX_HEIGHT, fill))
        shapes.append(_text(x + _BOX_WIDTH / 2, y + 19, room, size=14, bold=True))
        shapes.append(_text(x + _BOX_WIDTH / 2, y + 35, SHOWN[room][1], size=11))
    height = (top + 1) * _ROW + 18
    note = "An arrow is an import; those that follow from others are left out. Green: works without torch."
    shapes.append(_text(width / 2, height - 8, note, size=11))
    return _svg(width, height, shapes)


def _below(graph: Imports, room: str) -> frozenset[str]:
    """All rooms that it imports, also through others."""
    return graph[room].union(*(_below(graph, each) for each in graph[room]))


def _direct(graph: Imports, room: str) -> set[str]:
    """The rooms that it imports and that none of the others which it imports stands on."""
    return {each for each in graph[room] if not any(each in _below(graph, other) for other in graph[room])}


def _height(graph: Imports, room: str) -> int:
    return 1 + max((_height(graph, each) for each in graph[room]), default=-1)


# ---- one step in time -----------------------------------------------------------------------------------------------


def example_step() -> tuple[StepWork, StepRules]:
    """A step of 24 samples on one encoder rank and two backbone ranks, whose computing balances the sides."""
    texts = np.array([90, 200, 60, 150, 110, 260, 80, 140, 70, 180, 120, 100] * 2)
    rows = np.array([64, 0, 144, 36, 0, 100, 64, 0, 196, 49, 81, 0] * 2)
    has_image = rows > 0
    sizes = SampleSizes(
        tokens=texts + rows,
        targets=texts,
        media_start=np.concatenate([[0], np.cumsum(has_image)]),
        media_rows=rows[has_image],
        media_patches=4 * rows[has_image],
    )
    members = StepMembers({ENCODER: 1, BACKBONE: 2})
    plan = plan_step(sizes, np.arange(len(texts)), members, token_budget=512)
    seconds_per_token = 1 / 512
    seconds_per_patch = 0.45 * seconds_per_token * sizes.tokens.sum() / sizes.media_patches.sum()
    each = {BACKBONE: seconds_per_token, ENCODER: seconds_per_patch}
    work = step_work(plan, {role: partial(_seconds, once) for role, once in each.items()})
    return work, StepRules.separate(work, [Edge(ENCODER, BACKBONE)], in_flight={ENCODER: 4})


def _seconds(of_one: float, lengths: IntArray) -> PassTimes:
    return in_two_passes(of_one * float(lengths.sum()))


def draw_step() -> str:
    """A line per lane, a bar per work, and the way of one encoder batch through the pool and back."""
    work, rules = example_step()
    spans = simulate_steps([work], rules).spans
    lanes = {ranks[0]: (role, member) for role, of_role in rules.ranks.items() for member, ranks in enumerate(of_role)}
    ranks = sorted(lanes, key=lambda rank: (lanes[rank][1], lanes[rank][0]))  # so that no arrow crosses another lane
    end = max(span.end for span in spans)
    bottom = 34 + len(ranks) * (_LANE + _GAP)

    def x(seconds: float) -> float:
        return _LEFT + seconds / end * _STEP_WIDTH

    def y(rank: int) -> float:
        return 34 + ranks.index(rank) * (_LANE + _GAP)

    shapes = []
    for rank in ranks:
        shapes.append(_text(_LEFT - 10, y(rank) + 25, "{} {}".format(*lanes[rank]), size=13, anchor="end"))
        shapes.append(_box(x(0), y(rank), _STEP_WIDTH, _LANE, COLOURS["stall"], edge=False))
    for span in spans:
        shapes.append(_box(x(span.start), y(span.rank), x(span.end) - x(span.start), _LANE, COLOURS[span.work.kind]))
        middle = x((span.start + span.end) / 2)
        shapes.append(_text(middle, y(span.rank) + 25, str(span.work.batch.number), size=12, colour=_GROUND))
    for start, arrival in _journey(work, spans, number=1):
        down = ranks.index(start.rank) < ranks.index(arrival.rank)
        from_y = y(start.rank) + (_LANE if down else 0)
        to_y = y(arrival.rank) + (0 if down else _LANE)
        shapes.append(_arrow((x(start.end), from_y), (x(arrival.start), to_y), COLOURS["communication"], 2))
    legend = {
        "forward": COLOURS["forward"],
        "backward": COLOURS["backward"],
        "stall": COLOURS["stall"],
        "features of encoder batch 1, and their gradients": COLOURS["communication"],
    }
    place = float(_LEFT)
    for name, colour in legend.items():
        shapes.append(_box(place, bottom, 12, 12, colour, edge=False))
        shapes.append(_text(place + 18, bottom + 11, name, size=12, anchor="start"))
        place += 42 + 6.3 * len(name)
    shapes.append(_text(_LEFT, 20, "time of one step runs to the right", size=12, anchor="start"))
    return _svg(_LEFT + _STEP_WIDTH + 24, bottom + 26, shapes)


def _journey(work: StepWork, spans: list[SimulatedSpan], number: int) -> Iterator[tuple[SimulatedSpan, SimulatedSpan]]:
    """From an encoder batch's forward to those of its readers, and from their backwards to its own."""
    found = {span.work: span for span in spans}
    batch = BatchOf(ENCODER, 0, number)
    for reader in sorted(set(work[ENCODER][0][number].readers)):
        yield found[Work(batch, "forward")], found[Work(reader, "forward")]
        yield found[Work(reader, "backward")], found[Work(batch, "backward")]


# ---- shapes ---------------------------------------------------------------------------------------------------------


def _svg(width: int, height: int, shapes: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="{_GROUND}"/>', *shapes, "</svg>"]) + "\n"


def _box(x: float, y: float, width: float, height: float, fill: str, edge: bool = True) -> str:
    stroke = f' stroke="{_GROUND}" stroke-width="1"' if edge else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" fill="{fill}"{stroke}/>'


def _text(
    x: float, y: float, words: str, *, size: int, bold: bool = False, anchor: str = "middle", colour: str = _INK
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{escape(words)}</text>"
    )


def _arrow(start: tuple[float, float], end: tuple[float, float], colour: str, thickness: float = 1.2) -> str:
    """A straight line with a head of two short strokes."""
    (x0, y0), (x1, y1) = start, end
    along = np.array([x1 - x0, y1 - y0])
    along = along / np.hypot(*along)
    across = np.array([-along[1], along[0]])
    left, right = (np.array(end) - 8 * along + side * 4 * across for side in (1, -1))
    path = (
        f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}M{left[0]:.1f} {left[1]:.1f}L{x1:.1f} {y1:.1f}"
        f"L{right[0]:.1f} {right[1]:.1f}"
    )
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{thickness}"/>'


if __name__ == "__main__":
    main()
