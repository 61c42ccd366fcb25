"""What a person reads in a record, by the plainest means there are: an independent reading beside the data room's."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.data.support import SPECIAL

IGNORED = -100
NAMING = ("image", "path", "url", "image_url")
"""Under which a part of a content names its image; the first that is there counts."""


class Seen(NamedTuple):
    """A record, written for the backbone by ``support.TEMPLATE`` and read by ``support.Letters``.

    Attributes:
        tokens: ids.
        labels: for each the id that follows, where that is to be learned.
        positions: of the tokens in whose place rows of features go.
        images: paths as they stand in the record, or bytes.
    """

    tokens: list[int]
    labels: list[int]
    positions: list[int]
    images: list[str | bytes]


class Piece(NamedTuple):
    """A token, whether it is learned, and whether a row of features takes its place."""

    token: int
    learned: bool
    is_row: bool = False


def seen_in(fields: Any, rows: list[int]) -> Seen:
    """What stands in a record whose images have so many rows of features.

    Raises:
        KeyError, TypeError, AttributeError: nothing that a person could read.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    if "messages" in fields or "conversations" in fields:
        left = iter(rows)
        pieces = list(_conversation(fields, left))
        assert next(left, None) is None, "it has more images than are used"
    elif "input_ids" in fields:
        pieces = list(_given(fields, rows))
    else:
        pieces = [Piece(token, True) for token in _letters(fields["text"])]
    return Seen(
        tokens=[piece.token for piece in pieces],
        labels=[piece.token if piece.learned else IGNORED for piece in pieces[1:]] + [IGNORED],
        positions=[place for place, piece in enumerate(pieces) if piece.is_row],
        images=[_file(item) for item in _items(fields)],
    )


def _conversation(fields: dict[str, Any], rows: Iterator[int]) -> Iterator[Piece]:
    yield Piece(SPECIAL["<B>"], False)
    turns = _turns(fields)
    if fields.get("system"):
        turns.insert(0, {"role": "system", "content": fields["system"]})
    headers = {"human": "<U>", "user": "<U>", "gpt": "<A>", "assistant": "<A>", "system": "<S>"}
    for turn in turns:
        header = headers[turn["role"]]
        learned = header == "<A>" and all(turn.get(name) in (None, 1) for name in ("weight", "loss"))
        yield Piece(SPECIAL[header], False)
        for number, text in enumerate(_text(turn).split("<image>")):
            if number:
                yield Piece(ord("["), False)
                yield from [Piece(SPECIAL["<I>"], False, is_row=True)] * next(rows)
                yield Piece(ord("]"), False)
            yield from (Piece(token, learned) for token in _letters(text))
        yield Piece(SPECIAL["<E>"], learned)


def _turns(fields: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" in fields:
        return _marked([_worded(turn) for turn in fields["messages"]], len(_beside(fields)))
    return [_worded(turn) for turn in fields["conversations"]]


def _worded(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn in the words of ``messages``; either list may have those of LLaVA's ``conversations``."""
    return turn if "role" in turn else {**turn, "role": turn["from"], "content": turn["value"]}


def _marked(turns: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Images of which no place is marked stand before the first question."""
    first = next((number for number, turn in enumerate(turns) if turn["role"] in ("user", "human")), None)
    if first is None or any("<image>" in _text(turn) for turn in turns):
        return turns
    marked = {**turns[first], "content": "<image>" * images + _text(turns[first])}
    return [*turns[:first], marked, *turns[first + 1 :]]


def _beside(fields: dict[str, Any]) -> list[Any]:
    found = fields.get("images") or fields.get("image") or []
    return found if isinstance(found, list) else [found]


def _text(turn: dict[str, Any]) -> str:
    content = turn["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else "<image>" for part in content)


def _given(fields: dict[str, Any], rows: list[int]) -> Iterator[Piece]:
    ids, labels = fields["input_ids"], fields.get("labels") or fields["input_ids"]
    of_image = iter(rows if ids.count(SPECIAL["<I>"]) == len(rows) else [1] * sum(rows))
    for token, label in zip(ids, labels, strict=True):
        is_row = token == SPECIAL["<I>"] and bool(rows)
        yield from [Piece(token, label != IGNORED, is_row)] * (next(of_image) if is_row else 1)


def _letters(text: str) -> list[int]:
    return [SPECIAL.get(part) or ord(part) for part in re.findall(r"<[BSUAEI]>|.", text, re.DOTALL)]


def _items(fields: dict[str, Any]) -> list[Any]:
    """The images of a record: those within its turns, or those beside them."""
    contents = [turn["content"] for turn in _turns(fields)] if {"messages", "conversations"} & fields.keys() else []
    parts = [part for content in contents if isinstance(content, list) for part in content if part["type"] != "text"]
    named = [[part[key] for key in NAMING if part.get(key) is not None] for part in parts]
    within = [items[0] for items in named if items]
    return within or _beside(fields)


def _file(item: Any) -> str | bytes:
    path = item if isinstance(item, str) else item["path"] if "path" in item else item["url"]
    assert isinstance(path, str)
    return base64.b64decode(path.partition(",")[2]) if path.startswith("data:") else path
