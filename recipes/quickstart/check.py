"""Data files that the report looks at: records with their own pictures, with swapped ones, and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]

SWAP = 7  # every picture gives way to the seventh after it: to none that a record of two drawings shares with it


def read_records(path: Path, limit: int | None = None) -> list[Record]:
    """The first records of a file, with absolute paths of pictures, so that they may be written elsewhere."""
    records: list[Record] = [json.loads(line) for line in path.read_text().splitlines()[:limit]]
    for record in records:
        record["images"] = [image | {"path": str(path.parent.resolve() / image["path"])} for image in record["images"]]
    return records


def write_records(path: Path, records: list[Record]) -> None:
    """Write records as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def swapped(records: list[Record]) -> list[Record]:
    """The same conversations, each about the pictures of other records."""
    pictures = [image for record in records for image in record["images"]]
    others = iter(pictures[SWAP:] + pictures[:SWAP])
    return [record | {"images": [next(others) for _ in record["images"]]} for record in records]


def prompts(records: list[Record]) -> list[Record]:
    """The records of one drawing, cut after the first answer, which a prediction then writes anew."""
    return [record | {"messages": record["messages"][:2]} for record in records if len(record["images"]) == 1]


def keywords(answer: str) -> list[str]:
    """The keywords of an answer."""
    return [keyword.strip() for keyword in answer.split(",")]
