"""Formats of data files: JSON Lines or a JSON array, of ``messages`` records or LLaVA's records."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowtrain_lightning.data.understood import (
    NotUnderstoodError,
    check_image,
    check_part,
    system_of,
    written_beside_turns,
    written_in_turn,
)

MEDIA_MARKER = "<image>"
"""Marks in a record's text where its next image belongs."""

_IMAGE_KEYS = ("image", "path", "url", "image_url")
"""Under which a part of a content may name its image; parts that name none take the next of the record's."""

_LLAVA_ROLES = {"human": "user", "gpt": "assistant"}


class DataError(ValueError):
    """Data that cannot be used; the message names the file and the record."""


@dataclass(frozen=True)
class Turn:
    """What one role says, with a ``<image>`` marker for each image.

    Attributes:
        role: who says it.
        text: what is said.
        learned: False where an assistant's turn shall not be learned (``"weight": 0`` in the file).
        others: what else the turn holds, for the template to write: ``tool_calls``, say.
    """

    role: str
    text: str
    learned: bool = True
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """One record of a data file.

    Attributes:
        where: the file and the record's number and id, for messages.
        id: the record's ``id``, or its number (from 1) where it has none.
        turns: the conversation.
        images: one path per marker, in order.
        fields: the record as it stands in the file.
        others: what the record holds beside its turns for the template to write: ``tools``, say.
    """

    where: str
    id: str
    turns: tuple[Turn, ...]
    images: tuple[Path, ...]
    fields: dict[str, Any]
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LocatedRecord:
    """A record, with its offset and length in its file, in bytes."""

    offset: int
    length: int
    record: Record


def scan(path: Path) -> Iterator[LocatedRecord]:
    """All records of a file in order: a JSON array, or JSON Lines (empty lines are skipped).

    Raises:
        DataError: there is no such file, or a record cannot be understood.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file.")
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    located = _scan_array(path) if start.startswith(b"[") else _scan_lines(path)
    for number, (offset, length, fields) in enumerate(located):
        yield LocatedRecord(offset, length, parse(fields, path, number))


def read(path: Path, number: int, offset: int, length: int) -> Record:
    """The record with this number (from 0), of which ``scan`` told offset and length.

    Raises:
        DataError: these bytes are no record (the file was changed).
    """
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(length)
    return parse(_decoded(content, path, number), path, number)


def parse(fields: Any, path: Path, number: int) -> Record:
    """What one JSON value means; ``number`` counts from 0.

    Raises:
        DataError: it is neither a ``messages`` nor a LLaVA record, or markers and images disagree, or it holds what
            would change what is learned and is not obeyed.
    """
    where = f"{path}, record {number + 1}"
    if not isinstance(fields, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(fields).__name__}.")
    name = str(fields.get("id", number + 1))
    where = f"{where} (id {name!r})" if "id" in fields else where
    try:
        turns, named = _conversation(fields, where)
        beside = _beside(fields, where)
        others = written_beside_turns(fields)
    except NotUnderstoodError as error:
        raise DataError(f"{where}: {error}.") from None
    if named and beside:
        raise DataError(f"{where}: it names images within its turns and beside them; name all of them in one way.")
    images = named or beside
    markers = sum(turn.text.count(MEDIA_MARKER) for turn in turns)
    if markers != len(images):
        raise DataError(
            f"{where}: its text has {markers} {MEDIA_MARKER} markers, but it names {len(images)} images; "
            "give one image for each marker, in order."
        )
    files = tuple(path.parent / _file_name(image, where) for image in images)
    return Record(where, name, turns, files, fields, others)


def _conversation(fields: dict[str, Any], where: str) -> tuple[tuple[Turn, ...], list[Any]]:
    """The turns, and the images that are named within them."""
    if "messages" in fields:
        turns, named = _turns(fields["messages"], where, "messages", "role", "content")
    elif "conversations" in fields:
        turns, named = _turns(fields["conversations"], where, "conversations", "from", "value")
    else:
        raise DataError(
            f"{where}: expected 'messages' (with 'images') or 'conversations' (with 'image'), found neither."
        )
    system = system_of(fields)
    if system is None:
        return turns, named
    if turns[0].role == "system":
        raise DataError(f"{where}: its first turn is the system's, but it has 'system' beside its turns too; keep one.")
    return (Turn("system", system), *turns), named


def _beside(fields: dict[str, Any], where: str) -> list[Any]:
    """The images that are named beside the turns."""
    both = [_several(fields.get(name)) for name in ("images", "image")]
    if all(both):
        raise DataError(f"{where}: it has 'images' and 'image'; name all images in one of them.")
    images = both[0] or both[1]
    for image in images:
        check_image(image)
    return [image.get("path") if isinstance(image, dict) else image for image in images]


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _file_name(image: Any, where: str) -> str:
    if not isinstance(image, str):
        raise DataError(f"{where}: every image needs a path, a string.")
    if "://" in image or image.startswith("data:"):
        raise DataError(
            f"{where}: the image {image[:60]!r} is no file. Images are read from files; save it as one, and name "
            "its path."
        )
    return image


def _turns(items: Any, where: str, name: str, role_key: str, text_key: str) -> tuple[tuple[Turn, ...], list[Any]]:
    """The turns, and the images that are named within them."""
    if not isinstance(items, list) or not items:
        raise DataError(f"{where}: '{name}' must be a list with at least one turn.")
    turns, images = [], []
    for item in items:
        role, content = (item.get(role_key), item.get(text_key)) if isinstance(item, dict) else (None, None)
        learned, others = written_in_turn(item, (role_key, text_key)) if isinstance(item, dict) else (True, {})
        content = "" if content is None and "tool_calls" in others else content
        text, named = _parts(content, where) if isinstance(content, list) else (content, [])
        if not isinstance(role, str) or not isinstance(text, str):
            raise DataError(f"{where}: every turn in '{name}' needs '{role_key}' and '{text_key}', both strings.")
        _refuse_halves(text, where)
        turns.append(Turn(_LLAVA_ROLES.get(role, role), text, learned, others))
        images += named
    return tuple(turns), images


def _parts(parts: list[Any], where: str) -> tuple[str, list[Any]]:
    """Text with markers, and the images that are named, of content that is a list, as chat templates take it."""
    text, images = "", []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in ("text", "image", "image_url"):
            check_part(part)
        if kind == "text" and isinstance(part.get("text"), str):
            text += part["text"]
        elif kind in ("image", "image_url"):
            text += MEDIA_MARKER
            images += [part[key] for key in _IMAGE_KEYS if part.get(key) is not None][:1]
        else:
            raise DataError(
                f"{where}: content that is a list holds {{'type': 'text', 'text': ...}} and {{'type': 'image'}}, but "
                f"here it has {str(part)[:80]}."
            )
    return text, [image.get("url") if isinstance(image, dict) else image for image in images]


def _refuse_halves(text: str, where: str) -> None:
    """JSON can hold one half of a pair that UTF-16 writes a character with; fast tokenizers fail there."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise DataError(
            f"{where}: its text holds half of a character, {half}, as is left where an emoji was cut; take it out."
        ) from error


def _decoded(content: bytes, path: Path, number: int) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, record {number + 1}: not valid UTF-8 ({error}); save the file as UTF-8.") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, record {number + 1}: not valid JSON ({error}).") from error


def _scan_lines(path: Path) -> Iterator[tuple[int, int, Any]]:
    offset = number = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield offset, len(line), _decoded(line, path, number)
                number += 1
            offset += len(line)


def _scan_array(path: Path) -> Iterator[tuple[int, int, Any]]:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 ({error}); save the file as UTF-8.") from error
    decoder = json.JSONDecoder()
    position, number = text.index("[") + 1, 0
    offset = len(text[:position].encode())
    while True:
        start = _after_space(text, position)
        if text[start : start + 1] == "]":
            if _after_space(text, start + 1) < len(text):
                raise DataError(
                    f"{path}: more follows after the JSON array, which ends with record {number}; put all records into "
                    "one array, or write each on a line of its own."
                )
            return
        if number > 0:
            if text[start : start + 1] != ",":
                raise DataError(f"{path}: expected ',' or ']' after record {number}; the JSON array is broken there.")
            start = _after_space(text, start + 1)
        try:
            fields, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, record {number + 1}: not valid JSON ({error}).") from error
        # Characters are counted as bytes piece by piece: reading back needs byte offsets.
        offset += len(text[position:start].encode())
        length = len(text[start:end].encode())
        yield offset, length, fields
        position, offset, number = end, offset + length, number + 1


def _after_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
