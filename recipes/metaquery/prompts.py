"""Prompts that name a shape, its colour, size and place, and drawings of them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from recipes.quickstart.colours import main_colours

COLOURS = {
    "red": (214, 40, 40),
    "orange": (240, 140, 30),
    "yellow": (240, 215, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "purple": (140, 60, 180),
}
SHAPES = ("circle", "square", "triangle")
SIZES = {"small": 14, "medium": 18, "large": 22}
PLACES = {"left": (0.0, 0.5), "right": (1.0, 0.5), "top": (0.5, 0.0), "bottom": (0.5, 1.0), "middle": (0.5, 0.5)}
"""Across and down, of the room that a shape leaves."""
SIDE = 32
"""Of a drawing, in pixels."""

_COLOURLESS = 40
"""Of 255, by which red, green and blue of a pixel differ at most that is white, grey or black."""


class Prompt(NamedTuple):
    """A drawing in words."""

    size: str
    colour: str
    shape: str
    place: str

    def __str__(self) -> str:
        return f"Draw a {self.size} {self.colour} {self.shape} {self.place}"


def prompts(held_out: int) -> tuple[list[Prompt], list[Prompt]]:
    """All prompts in an order that is always the same: those to train on, and so many that training never sees."""
    every = [Prompt(*words) for words in product(SIZES, COLOURS, SHAPES, PLACES)]
    mixed = [every[number] for number in np.random.default_rng(0).permutation(len(every))]
    return mixed[held_out:], mixed[:held_out]


def write_records(folder: Path, wanted: list[Prompt], asked: list[Prompt] | None = None) -> Path:
    """Writes drawings and a file of records that ask for them.

    Args:
        folder: for all of them.
        wanted: what is drawn.
        asked: the words of each record; None takes those of the drawings.

    Returns:
        The file of records.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw, lines = np.random.default_rng(len(wanted)), []
    for number, (prompt, words) in enumerate(zip(wanted, asked or wanted, strict=True)):
        drawing(prompt, draw).save(folder / f"{number}.png")
        told = {"type": "image", "path": f"{number}.png", "generate": True}
        asks = {"role": "user", "content": [{"type": "text", "text": str(words)}]}
        lines.append(json.dumps({"messages": [asks, {"role": "assistant", "content": [told]}]}))
    (folder / "records.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder / "records.jsonl"


def drawing(prompt: Prompt, draw: np.random.Generator) -> Image.Image:
    """The drawing on white, a little larger or smaller, and a little off its place."""
    image = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    size = SIZES[prompt.size] + int(draw.integers(-1, 2))
    across, down = (float(np.clip(at + draw.normal(0, 0.05), 0, 1)) * (SIDE - size) for at in PLACES[prompt.place])
    box, pencil, colour = (across, down, across + size, down + size), ImageDraw.Draw(image), COLOURS[prompt.colour]
    if prompt.shape == "circle":
        pencil.ellipse(box, fill=colour)
    elif prompt.shape == "square":
        pencil.rectangle(box, fill=colour)
    else:
        pencil.polygon([(across, down + size), (across + size, down + size), (across + size / 2, down)], fill=colour)
    return image


def dominant_colour(pixels: NDArray[np.uint8]) -> str:
    """The colour that most of a drawing's coloured pixels have; ``"white"`` of one without any.

    Args:
        pixels: ``[height, width, 3]``.
    """
    every = pixels.reshape(-1, 3)
    coloured = every[every.max(1) - every.min(1) > _COLOURLESS]
    return main_colours(coloured)[0]
