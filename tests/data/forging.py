"""Records whose texts spell special tokens, whole, in halves and over several parts, beside harmless ones alike."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain_lightning.data import IGNORED_LABEL, Record, TokenSequence
from flowtrain_lightning.data.records.formats import parse
from flowtrain_lightning.data.records.record_turns import MARKERS

_WORDS = ("ignore", "\n", " ", "assistant", "owned", "user\n", "<", "|>", "Grüße", "system", "word ")


@dataclass(frozen=True)
class Pair:
    """Two records of one shape.

    Attributes:
        forged: its texts spell special tokens.
        harmless: its texts spell none.
        answers: what the assistant says in each, by turn.
    """

    forged: Record
    harmless: Record
    answers: list[tuple[str, str]]


class _Texts:
    """Texts by chance, each with its harmless twin of the same shape."""

    def __init__(self, seed: int, specials: Sequence[str]) -> None:
        self.chance = random.Random(seed)
        self._specials = specials

    def fragment(self, marker_too: bool = False) -> str:
        if self.chance.random() < 0.4:
            return self.chance.choice(_WORDS)
        special = self.chance.choice([name for name in self._specials if marker_too or name not in MARKERS.values()])
        cut = self.chance.randrange(1, len(special))
        return self.chance.choice((special, special[:cut], special[cut:], special + special))

    def text(self, most: int = 5, marker_too: bool = False) -> str:
        """A text in which no marker of the record form comes about where it may hold none."""
        while True:
            found = "".join(self.fragment(marker_too) for _ in range(self.chance.randint(1, most)))
            if marker_too or not any(marker in found for marker in MARKERS.values()):
                return found

    def content(self, images: int, mark: str) -> tuple[Any, Any, str]:
        """A content with so many images: of the forged record, of the harmless one, and the text of the former."""
        text = self.text()
        if images == 0 and self.chance.random() < 0.5:
            return text, mark, text
        cuts = sorted(self.chance.randrange(len(text) + 1) for _ in range(images + self.chance.randint(0, 2)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        forged: list[dict[str, str]] = []
        harmless = [{"type": "text", "text": mark}]
        for number, piece in enumerate(pieces):
            if 0 < number <= images:
                forged.append({"type": "image"})
                harmless.append({"type": "image"})
            forged.append({"type": "text", "text": piece})
        return forged, harmless, text


def conversation(
    seed: int, specials: Sequence[str], image: Path | None, *, system: bool, tools: bool, turns: int = 2
) -> Pair:
    """A conversation with up to two images, whose texts spell special tokens.

    Args:
        seed: all is drawn from it.
        specials: the special tokens.
        image: an image's file; None: there are none.
        system: whether there may be a system's text.
        tools: whether there may be tools, calls of them, and what they answer.
        turns: questions and answers, at most.
    """
    texts = _Texts(seed, specials)
    chance, sides = texts.chance, ([], [])
    images, answers = 0, []
    for number in range(chance.randint(1, turns)):
        count = chance.randint(0, 2) if image is not None and number == 0 else 0
        images += count
        for role, shown in (("user", count), ("assistant", 0)):
            mark = f"{role}said{number}"
            forged, harmless, said = texts.content(shown, mark)
            for side, content in zip(sides, (forged, harmless), strict=True):
                side.append({"role": role, "content": content})
            answers += [(said, mark)] if role == "assistant" else []
    beside: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    if system and chance.random() < 0.5:
        for fields, text in zip(beside, (texts.text(), "be short"), strict=True):
            fields["system"] = text
    if tools and chance.random() < 0.7:
        said = [texts.text(2, True) for _ in range(6)]
        marks = ["toolname", "toolword", "toolkey", "callname", "callkey", "callvalue"]
        for side, fields, words in zip(sides, beside, (said, marks), strict=True):
            _add_tools(side, fields, words)
        as_json = (json.dumps(text, ensure_ascii=False)[1:-1] for text in said[4:])
        answers += zip([said[3], *as_json], marks[3:], strict=True)
    shown = {} if not images else {"images": [str(image)] * images}
    forged, harmless = (
        parse({"messages": side, **fields, **shown}, "/d.jsonl", 0, Path)
        for side, fields in zip(sides, beside, strict=True)
    )
    return Pair(forged, harmless, answers)


def _add_tools(turns: list[dict[str, Any]], beside: dict[str, Any], words: list[str]) -> None:
    """A tool and a call of it, by three words each, and what the tool answers."""
    tool = {"name": words[0], "description": words[1], "parameters": {"type": "object", "properties": {words[2]: {}}}}
    beside["tools"] = [{"type": "function", "function": tool}]
    turns[1]["tool_calls"] = [{"type": "function", "function": {"name": words[3], "arguments": {words[4]: words[5]}}}]
    answered = [{"type": "text", "text": word} for word in words[:2] if word not in MARKERS.values()]
    turns.insert(2, {"role": "tool", "content": answered})
    turns.insert(3, {"role": "assistant", "content": "so"})


def specials_in(sequence: TokenSequence, ids: set[int]) -> Counter[int]:
    """How often each special id stands in a sequence."""
    return Counter(number for number in sequence.tokens.tolist() if number in ids)


def learned_ids(sequence: TokenSequence) -> list[int]:
    """The ids that are learned, in order."""
    found: list[int] = sequence.labels[sequence.labels != IGNORED_LABEL].tolist()
    return found


def judge(
    pair: Pair, write: Callable[[Record], TokenSequence], ids: set[int], decode: Callable[[list[int]], str]
) -> None:
    """Compares what becomes of the two: special ids, places of features, and what is learned.

    Args:
        pair: the records.
        write: makes tokens of one.
        ids: the special ids.
        decode: the text of ids, special tokens not left out.
    """
    forged, harmless = write(pair.forged), write(pair.harmless)
    assert specials_in(forged, ids) == specials_in(harmless, ids), pair.forged.fields
    assert len(forged.media_positions) == len(harmless.media_positions) == forged.media_rows.sum()
    expected = decode(learned_ids(harmless))
    for said, mark in pair.answers:
        assert expected.count(mark) == 1, (expected, mark)
        expected = expected.replace(mark, said)
    found = decode(learned_ids(forged))
    assert "".join(found.split()) == "".join(expected.split()), (pair.forged.fields, found, expected)
