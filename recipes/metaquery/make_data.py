"""Makes the pictures and prompts: figures of one colour on white, each named in a sentence.

    python -m recipes.metaquery.make_data [folder]

Some pairs of a colour and a figure are never trained: the prompts of the validation name these alone.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

FOLDER = Path("runs/metaquery/data")
SIDE = 32
COLOURS = {
    "red": (214, 39, 40),
    "orange": (255, 140, 26),
    "yellow": (240, 220, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "purple": (150, 60, 200),
}
FIGURES = ("circle", "square", "triangle", "star", "cross", "ring", "card", "flag")
PROMPTS = (
    "Draw a {colour} {figure}.",
    "A {figure}, {colour}.",
    "Please draw one {figure} in {colour}.",
    "{colour} {figure}",
)
TRAINED, HELD_OUT = 1600, 100


def main() -> None:
    """Make both files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    pairs = [(colour, figure) for colour in COLOURS for figure in FIGURES]
    held = {pair for number, pair in enumerate(pairs) if number % 5 == 2}
    write(folder, "train", [pair for pair in pairs if pair not in held], TRAINED, draw)
    write(folder, "val", sorted(held), HELD_OUT, draw)


def write(folder: Path, stage: str, pairs: Sequence[tuple[str, str]], count: int, draw: np.random.Generator) -> None:
    """Write records of these pairs, one after another, each with a picture of its own."""
    lines = []
    for number in range(count):
        colour, figure = pairs[number % len(pairs)]
        path = folder / f"{stage}-{number}.png"
        picture(colour, figure, draw).save(path)
        prompt = str(draw.choice(PROMPTS)).format(colour=colour, figure=figure)
        content = [{"type": "image", "path": path.name, "generate": True}]
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": content}]
        lines.append(json.dumps({"id": f"{colour} {figure} {number}", "messages": turns}))
    (folder / f"{stage}.jsonl").write_text("\n".join(lines) + "\n")


def picture(colour: str, figure: str, draw: np.random.Generator) -> Image.Image:
    """A figure somewhere near the middle, in one of many sizes."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen, ink = ImageDraw.Draw(image), COLOURS[colour]
    x, y = draw.uniform(13, 19, 2)
    r = draw.uniform(8, 12)
    box = (x - r, y - r, x + r, y + r)
    if figure == "circle":
        pen.ellipse(box, fill=ink)
    elif figure == "ring":
        pen.ellipse(box, outline=ink, width=5)
    elif figure == "square":
        pen.rectangle(box, fill=ink)
    elif figure == "card":
        pen.rectangle((x - r, y - r / 2, x + r, y + r / 2), fill=ink)
    elif figure == "cross":
        pen.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=ink)
        pen.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=ink)
    elif figure == "flag":
        pen.rectangle((x - r, y - r, x - r + 2, y + r), fill=ink)
        pen.rectangle((x - r, y - r, x + r, y + r / 4), fill=ink)
    else:
        points, inner = (3, 1.0) if figure == "triangle" else (5, 0.45)
        turns = [(math.pi * n / points, 1.0 if n % 2 == 0 else inner) for n in range(2 * points)]
        turns = turns[::2] if figure == "triangle" else turns
        pen.polygon([(x + r * s * math.sin(a), y - r * s * math.cos(a)) for a, s in turns], fill=ink)
    return image


if __name__ == "__main__":
    main()
