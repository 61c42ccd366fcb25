"""Reads the turns of a record, in each of the forms in which conversations are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.records.completion import COMPLETED
from flowtrain_lightning.data.records.understood import NotUnderstoodError, check_part, system_of, written_in_turn

MARKERS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
"""Mark in a record's text where its next image, video or clip of audio belongs."""

_MARKER = re.compile("|".join(MARKERS.values()))
_KINDS = {marker: kind for kind, marker in MARKERS.items()}

_PART_TYPES = {"text": "text", **{f"{kind}{end}": kind for kind in MARKERS for end in ("", "_url")}}
_PART_KEYS = {kind: (kind, "path", "url", f"{kind}_url") for kind in MARKERS}
"""Under which a part of a content may name its media item; parts that name none take the next of the record's."""

_WRITTEN_AS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Usual fields of the turns in each list; either list may use the other's."""

ASSISTANT = "assistant"
"""The role whose turns carry loss."""

_PAIR = ("user", ASSISTANT)

_LLAVA_ROLES = {"human": "user", "gpt": ASSISTANT}

Named = dict[str, list[Any]]
"""The kind of media -> what turns name of it, in order; what is to be generated is `ToGenerate`."""


@dataclass(frozen=True)
class ToGenerate:
    """An image that a turn names to be generated."""

    item: Any


@dataclass(frozen=True)
class Turn:
    """The words of one role, with an ``<image>``, ``<video>`` or ``<audio>`` marker for each media item.

    Attributes:
        role: who says it.
        text: what is said.
        learned: False where an assistant's turn shall not be learned (``"weight": 0`` in the data).
        others: what else the turn holds, for the template to write: ``tool_calls``, say.
    """

    role: str
    text: str
    learned: bool = True
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """``"image"``, ``"video"`` or ``"audio"`` for each marker, in order."""
        return tuple(_KINDS[marker] for marker in _MARKER.findall(self.text))

    @property
    def texts(self) -> list[str]:
        """The texts before, between and behind the markers: one more than there are of these."""
        return _MARKER.split(self.text)


def conversation_of(
    fields: dict[str, Any], beside: Mapping[str, int], where: str
) -> tuple[tuple[Turn, ...], Named] | None:
    """The turns of a record, and the media that are named within them; None where it is no conversation.

    ``prompt`` and ``completion`` are TRL's, of which only the completion is learned; ``texts`` are pairs of a question
    and an answer as in The Cauldron and FineVision. Where these or ``messages`` mark no place of an image, images stand
    before the first user's text, as TRL puts them; clips of audio likewise, behind the images. LLaVA's
    ``conversations`` mark all.

    Args:
        fields: the record as it stands in the data.
        beside: how many images, videos and clips of audio it names beside its turns.
        where: for messages.

    Raises:
        DataError: turns are not written as they should be.
        NotUnderstoodError: they hold what nothing here obeys.
    """
    listed = next((name for name in _WRITTEN_AS if name in fields), None)
    if listed is not None:
        turns, named = _turns(fields[listed], where, listed)
        turns = _unmarked_first(turns, beside, named) if listed == "messages" else turns
    elif "text" in fields or "input_ids" in fields or all(isinstance(fields.get(name), str) for name in COMPLETED):
        return None
    elif all(name in fields for name in COMPLETED):
        turns, named = _completed(fields["prompt"], fields["completion"], where)
        turns = _unmarked_first(turns, beside, named)
    elif "texts" in fields:
        turns, named = _pairs(fields["texts"], where), {kind: [] for kind in MARKERS}
        turns = _unmarked_first(turns, beside, named)
    else:
        return None
    system = system_of(fields)
    if system is None:
        return turns, named
    if turns[0].role == "system":
        raise DataError(f"{where}: its first turn is the system's, but it has 'system' beside its turns too; keep one.")
    return (Turn("system", system), *turns), named


def _completed(prompt: Any, completion: Any, where: str) -> tuple[tuple[Turn, ...], Named]:
    """The turns of a prompt, of which none is learned, and those of its completion."""
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise NotUnderstoodError("its 'prompt' and 'completion' must both be lists of turns, or both plain text")
    (before, named), (after, named_after) = _turns(prompt, where, "prompt"), _turns(completion, where, "completion")
    unlearned = (replace(turn, learned=False) for turn in before)
    return (*unlearned, *after), {kind: named[kind] + named_after[kind] for kind in MARKERS}


def _pairs(items: Any, where: str) -> tuple[Turn, ...]:
    """The turns of questions and answers."""
    if not isinstance(items, list) or not items:
        raise DataError(f"{where}: 'texts' must be a list with at least one pair of 'user' and 'assistant'.")
    turns: list[Turn] = []
    for pair in items:
        unknown = sorted(pair.keys() - {*_PAIR, "source"}) if isinstance(pair, dict) else []
        if unknown:
            raise NotUnderstoodError(f"a pair in 'texts' has {unknown[0]!r}, which is not understood; take it out")
        for role in _PAIR:
            text = pair.get(role) if isinstance(pair, dict) else None
            if not isinstance(text, str):
                raise DataError(f"{where}: every pair in 'texts' needs 'user' and 'assistant', both strings.")
            refuse_halves(text, where)
            turns.append(Turn(role, text))
    return tuple(turns)


def _unmarked_first(turns: tuple[Turn, ...], beside: Mapping[str, int], named: Named) -> tuple[Turn, ...]:
    """The turns with a marker for each image before the first user's text, where no place of one is marked; so audio.

    Videos are always marked.
    """
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        return turns
    unmarked = [
        kind for kind in ("image", "audio") if not named[kind] and not any(kind in turn.kinds for turn in turns)
    ]
    marked = replace(turns[first], text="".join(MARKERS[kind] * beside[kind] for kind in unmarked) + turns[first].text)
    return (*turns[:first], marked, *turns[first + 1 :])


def is_reference(item: Any) -> bool:
    """Whether it says where a media item is and does not hold it; ``b""`` holds one, which is empty."""
    return isinstance(item, dict) and not isinstance(item.get("bytes"), bytes) and not item.get("bytes")


def _turns(items: Any, where: str, name: str) -> tuple[tuple[Turn, ...], Named]:
    """The turns of a list, and the media that are named within them."""
    if not isinstance(items, list) or not items:
        raise DataError(f"{where}: '{name}' must be a list with at least one turn.")
    role_key, text_key = _keys(items[0], name)
    turns: list[Turn] = []
    named: Named = {kind: [] for kind in MARKERS}
    for item in items:
        role, content = (item.get(role_key), item.get(text_key)) if isinstance(item, dict) else (None, None)
        learned, others = written_in_turn(item, (role_key, text_key)) if isinstance(item, dict) else (True, {})
        content = "" if content is None and "tool_calls" in others else content
        text = _joined(content, named, where) if isinstance(content, list) else content
        if not isinstance(role, str) or not isinstance(text, str):
            raise DataError(f"{where}: every turn in '{name}' needs '{role_key}' and '{text_key}', both strings.")
        refuse_halves(text, where)
        turns.append(Turn(_LLAVA_ROLES.get(role, role), text, learned, others))
    return tuple(turns), named


def _keys(turn: Any, name: str) -> tuple[str, str]:
    """Under which the turns of a list hold who speaks, and what is said."""
    for keys in _WRITTEN_AS.values():
        if isinstance(turn, dict) and all(key in turn for key in keys):
            return keys
    return _WRITTEN_AS.get(name, _WRITTEN_AS["messages"])


def _joined(parts: list[Any], named: Named, where: str) -> str:
    """Text with markers of content that is a list, as chat templates take it; what it names goes to ``named``."""
    text = ""
    for part in parts:
        kind = _PART_TYPES.get(str(part.get("type"))) if isinstance(part, dict) else None
        if kind is not None:
            check_part(part)
        if kind == "text" and isinstance(part.get("text"), str):
            text += part["text"]
        elif kind in MARKERS:
            text += MARKERS[kind]
            items = [part[key] for key in _PART_KEYS[kind] if part.get(key) is not None][:1]
            found = [
                (item.get("path") if item.get("url") is None else item["url"]) if is_reference(item) else item
                for item in items
            ]
            if part.get("generate") and not found:
                raise DataError(f"{where}: an image to be generated names no file in its own part; give it a 'path'.")
            named[kind].extend(map(ToGenerate, found) if part.get("generate") else found)
        else:
            raise DataError(
                f"{where}: content that is a list holds {{'type': 'text', 'text': ...}}, {{'type': 'image'}}, "
                f"{{'type': 'video'}} and {{'type': 'audio'}}, but here it has {str(part)[:80]}."
            )
    return text


def refuse_halves(text: str, where: str) -> None:
    """JSON can hold one half of a pair that UTF-16 writes a character with; fast tokenizers fail there.

    Raises:
        DataError: ``text`` holds such a half.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise DataError(
            f"{where}: its text holds half of a character, {half}, as is left where an emoji was cut; take it out."
        ) from error
