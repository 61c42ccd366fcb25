"""How `data/` was made: small drawings with keywords, from Debian's packages of the Open Clip Art Library.

    apt-get download openclipart-png openclipart-svg
    for package in openclipart-*.deb; do dpkg-deb -x "$package" unpacked; done
    python -m recipes.quickstart.prepare_data unpacked/usr/share/openclipart

Every drawing lies in the first package as a PNG and in the second as an SVG, whose metadata hold title, author and
keywords. The same packages give the same folder again.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import re
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from recipes.quickstart.colours import main_colours
from recipes.quickstart.selection import clean_keyword, is_chosen, is_telling

DATA = Path(__file__).parent / "data"
LONG_SIDE = 80  # pixels: 100 patches of 8 x 8 for a square drawing; still recognisable, and quick on a CPU
PALETTE = 32  # colours per picture; with more of them the folder grows faster than the drawings get better
LARGEST_RATIO = 3.0  # of the sides; longer drawings would be a few pixels high
FOLDER_LIMIT = 72  # drawings per folder, so that 400 icons of one theme do not outweigh all animals
RARE = 12  # a keyword that fewer drawings have cannot be learnt in four minutes
KEYWORDS = 4  # at most, of one drawing, from the most frequent to the rarest


@dataclass(frozen=True)
class Drawing:
    """One drawing of the library: where it lies, and what its metadata say."""

    name: str
    title: str
    author: str
    keywords: tuple[str, ...]

    @property
    def id(self) -> str:
        """A short name that may be a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def order(self) -> str:
        """A key that shuffles drawings the same way everywhere."""
        return hashlib.md5(self.name.encode()).hexdigest()


def main() -> None:
    """Write the pictures and both record files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="the unpacked folder that holds png/ and svg/")
    library = parser.parse_args().library
    shutil.rmtree(DATA / "images", ignore_errors=True)
    (DATA / "images").mkdir(parents=True)
    described = {}
    for drawing in with_frequent_keywords(choose(library)):
        picture = open_drawing(library, drawing)
        if picture is not None:
            described[drawing] = write_picture(picture, drawing)
    training = [drawing for drawing in described if int(drawing.order, 16) % 10 != 0]
    validation = [drawing for drawing in described if int(drawing.order, 16) % 10 == 0]
    for file, drawings in (("train.jsonl", training), ("val.jsonl", validation)):
        written = records(drawings, described)
        (DATA / file).write_text("".join(json.dumps(record) + "\n" for record in written))
        print(f"{file}: {len(written)} records of {len(drawings)} drawings")


def choose(library: Path) -> list[Drawing]:
    """The drawings of the chosen folders, at most so many of each, without exact doubles."""
    per_folder: Counter[str] = Counter()
    seen: set[bytes] = set()
    chosen = []
    drawings = [read_metadata(library, path) for path in sorted((library / "svg").rglob("*.svg"))]
    for drawing in sorted(drawings, key=lambda drawing: drawing.order):
        folder = drawing.name.rpartition("/")[0]
        if not is_chosen(drawing.name) or per_folder[folder] == FOLDER_LIMIT:
            continue
        content = hashlib.md5((library / "png" / f"{drawing.name}.png").read_bytes()).digest()
        if content not in seen:
            seen.add(content)
            per_folder[folder] += 1
            chosen.append(drawing)
    return chosen


def read_metadata(library: Path, path: Path) -> Drawing:
    """Title, author and keywords of one SVG. Read as text, since some of the files are no valid XML."""
    text = path.read_text(errors="replace")
    found = re.search(r"<metadata.*?</metadata>", text, re.DOTALL)
    metadata = html.unescape(found.group(0)) if found else ""
    title = re.search(r"<dc:title>(.*?)</dc:title>", metadata, re.DOTALL)
    author = re.search(r"<dc:creator>.*?<dc:title>(.*?)</dc:title>", metadata, re.DOTALL)
    keywords = re.findall(r"<rdf:li>(.*?)</rdf:li>", metadata, re.DOTALL)
    return Drawing(
        name=str(path.relative_to(library / "svg").with_suffix("")),
        title=title.group(1).strip() if title else "",
        author=(author.group(1).strip() if author else "") or "unknown",
        keywords=tuple(keywords),
    )


def with_frequent_keywords(drawings: list[Drawing]) -> list[Drawing]:
    """The drawings that have a frequent keyword, with these alone, the most frequent first."""
    cleaned = {
        drawing: {clean for keyword in drawing.keywords if (clean := clean_keyword(keyword)) is not None}
        for drawing in drawings
    }
    count = Counter(keyword for keywords in cleaned.values() for keyword in keywords)
    kept = []
    for drawing, keywords in cleaned.items():
        frequent = sorted((k for k in keywords if count[k] >= RARE), key=lambda k: (-count[k], k))
        if frequent:
            kept.append(replace(drawing, keywords=tuple(frequent[:KEYWORDS])))
    return kept


def open_drawing(library: Path, drawing: Drawing) -> Image.Image | None:
    """The drawing, small, with its transparency; None where it is too long for its height or its width."""
    with Image.open(library / "png" / f"{drawing.name}.png") as file:
        picture: Image.Image = file.convert("RGBA")
    picture = picture.crop(picture.getbbox())  # without the transparent margin, small drawings become larger
    if max(picture.size) / min(picture.size) > LARGEST_RATIO:
        return None
    scale = LONG_SIDE / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def write_picture(picture: Image.Image, drawing: Drawing) -> dict[str, Any]:
    """Write the drawing on white as a palette PNG; answer its record's picture and its main colours."""
    path = Path("images") / f"{drawing.id}.png"
    on_white = Image.new("RGBA", picture.size, "white")
    on_white.alpha_composite(picture)
    on_white.convert("RGB").quantize(PALETTE).save(DATA / path, optimize=True)
    opaque = np.asarray(picture)[np.asarray(picture)[..., 3] > 127][:, :3]
    image = {"path": str(path), "h": picture.height, "w": picture.width}
    return {"image": image, "colours": main_colours(opaque)}


def records(drawings: list[Drawing], described: dict[Drawing, dict[str, Any]]) -> list[dict[str, Any]]:
    """One record per drawing; every eighth gets its neighbour too, and one more record asks by the title alone."""
    written = []
    for number, drawing in enumerate(drawings):
        keywords = ", ".join(drawing.keywords)
        if number % 8 == 7:
            other = drawings[number - 1]
            images = [described[drawing]["image"], described[other]["image"]]
            turns = ["<image>\n<image>\nKeywords of both?", f"{keywords}; {', '.join(other.keywords)}"]
        else:
            images = [described[drawing]["image"]]
            turns = ["<image>\nKeywords?", keywords, "Colours?", ", ".join(described[drawing]["colours"])]
        written.append(_record(drawing, drawing.id, images, turns))
        if number % 6 == 5 and is_telling(drawing.title):
            turns = [f"Keywords of a drawing called {drawing.title}?", keywords]
            written.append(_record(drawing, f"{drawing.id}-title", [], turns))
    return written


def _record(drawing: Drawing, name: str, images: list[dict[str, Any]], turns: list[str]) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "id": name,
        "images": images,
        "messages": [{"role": roles[place % 2], "content": content} for place, content in enumerate(turns)],
        "author": drawing.author,
    }


if __name__ == "__main__":
    main()
