"""Small pictures of one colour, and records that ask for them: words say what, and a sketch says where."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from recipes.quickstart.colours import main_colours

COLOURS = {
    "red": (220, 30, 30),
    "orange": (250, 140, 20),
    "yellow": (240, 225, 30),
    "green": (40, 170, 60),
    "blue": (40, 90, 210),
    "purple": (190, 50, 200),
}
SHAPES = ("square", "circle", "triangle", "cross")
GROUNDS = {"white": 250, "grey": 140, "black": 15}
SIDE = 16
"""Of a picture, in pixels; of a sketch it is twice that."""

HELD_OUT = 20
"""Wishes that no training record has."""

Box = tuple[int, int, int, int]
"""Left, top, right and bottom of what a picture shows, in its pixels."""

Wish = tuple[str, str, str]
"""A colour, a shape and a ground."""


def wishes(held_out: int, seed: int = 0) -> tuple[list[Wish], list[Wish]]:
    """All that words can ask for, parted into what is trained on and what never is.

    Args:
        held_out: how many are never trained on.
        seed: of chance.
    """
    every = list(itertools.product(COLOURS, SHAPES, GROUNDS))
    order = np.random.default_rng(seed).permutation(len(every)).tolist()
    return [every[number] for number in order[held_out:]], [every[number] for number in order[:held_out]]


def write_scenes(folder: Path, asked: list[Wish], count: int, seed: int) -> Path:
    """Writes pictures, sketches and a file of records.

    Args:
        folder: for all of them.
        asked: what the words of a record may ask for; each comes equally often.
        count: of records.
        seed: of chance.

    Returns:
        The file of records.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw, records = np.random.default_rng(seed), []
    for number in range(count):
        wish, box = asked[number % len(asked)], random_box(draw)
        picture(wish, box).save(folder / f"{number}.png")
        sketch(box).save(folder / f"{number}-sketch.png")
        records.append(_record(words(wish), f"{number}-sketch.png", f"{number}.png"))
    return _written(folder / "records.jsonl", records)


def with_other_prompts(records: Path, seed: int) -> Path:
    """The same pictures, each asked for by the words of another record.

    Args:
        records: what `write_scenes` wrote.
        seed: of chance.
    """
    found = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    prompts = [record["messages"][0] for record in found]
    for record, other in zip(found, np.random.default_rng(seed).permutation(len(found)).tolist(), strict=True):
        record["messages"] = [prompts[other], record["messages"][1]]
    return _written(records.with_name("other-prompts.jsonl"), found)


def words(wish: Wish) -> str:
    """What asks for it."""
    return "Draw: a {} {} on {}".format(*wish)


def picture(wish: Wish, box: Box) -> Image.Image:
    """A shape of one colour on a ground."""
    colour, shape, ground = wish
    image = Image.new("RGB", (SIDE, SIDE), (GROUNDS[ground],) * 3)
    pencil, fill = ImageDraw.Draw(image), COLOURS[colour]
    left, top, right, bottom = box
    across, down = (left + right) // 2, (top + bottom) // 2
    if shape == "square":
        pencil.rectangle(box, fill)
    elif shape == "circle":
        pencil.ellipse(box, fill)
    elif shape == "triangle":
        pencil.polygon(((left, bottom), (across, top), (right, bottom)), fill)
    else:
        pencil.rectangle((across - 2, top, across + 2, bottom), fill)
        pencil.rectangle((left, down - 2, right, down + 2), fill)
    return image


def sketch(box: Box) -> Image.Image:
    """Where it is to be: the outline of its box, in grey on white."""
    image = Image.new("RGB", (2 * SIDE, 2 * SIDE), (255,) * 3)
    ImageDraw.Draw(image).rectangle([2 * edge for edge in box], outline=(90,) * 3, width=2)
    return image


def colour_of(pixels: NDArray[np.uint8]) -> str:
    """The colour that dominates a picture, but for its ground: one of `COLOURS`, or ``"none"``.

    Args:
        pixels: ``[height, width, 3]``.
    """
    return next((name for name in main_colours(pixels.reshape(-1, 3)) if name in COLOURS), "none")


def random_box(draw: np.random.Generator) -> Box:
    """Where something may be in a picture."""
    side = int(draw.integers(10, 14))
    left, top = (int(edge) for edge in draw.integers(0, SIDE - side + 1, 2))
    return left, top, left + side - 1, top + side - 1


def _record(text: str, shown: str, drawn: str) -> dict[str, Any]:
    asked = [{"type": "image", "path": shown}, {"type": "text", "text": text}]
    answer = [{"type": "image", "path": drawn, "generate": True}]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def _written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path
